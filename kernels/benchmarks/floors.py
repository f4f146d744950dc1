"""The least traffic that an operation can do with: every input and every output passes the memory once.

What has to be read and written does not depend on the algorithm, so that time over the time of this floor, at the
speed with which the machine copies, says how much an implementation could still gain at most.

    forward    inputs read + output written
    backward   inputs and the output's cotangent read + the inputs' gradients written
    together   their sum: between the two passes other layers run, and nothing of these tensors stays in a cache

For Hydra's scan, per token, with H heads of P channels, G groups of N states, s bytes per value of v and of the
vectors, and step sizes and diagonal in float32 (a decay per head does not count):

    forward    2 H P s + 4 G N s + 3 * 4 H
    backward   3 H P s + 8 G N s + 6 * 4 H

At d_model 768 in bfloat16 (H 24, P 64, G 1, N 64) that is 6,944 and 10,816 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


class Floor(NamedTuple):
    """Bytes of each pass."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        """Bytes of a training step through the operation."""
        return self.forward + self.backward


def size_of(*tensors: Tensor) -> int:
    """Bytes of tensors' values, each once, however they are laid out."""
    return sum(x.numel() * x.element_size() for x in tensors)


def floor_of(inputs: Iterable[Tensor], output: Tensor) -> Floor:
    """The floor of an operation whose inputs all get a gradient."""
    given = size_of(*inputs)
    return Floor(given + size_of(output), given + size_of(output) + given)
