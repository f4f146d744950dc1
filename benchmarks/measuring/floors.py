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

For the MRU's scan H_t = H_{t-1} X_t, per element of the states (o * o * H a token), s bytes each:

    forward    X read, H written                     2 s
    backward   dH, X and H read, dX written          4 s

H is what a layer has kept anyway (its projection's gradient needs it), and dX_t = H_{t-1}^T B_t takes it as it is; an
algorithm that multiplied it again from X instead could do with 3 s.

For the MRU's mixer, from elements to outputs, states never leave the chip: per token, with H heads of E elements and
of o x d_c outputs of s bytes (states at the edges of chunks are few, and the projection's weights count once):

    forward    elements read, y written              H (E + o d_c) s
    backward   elements and dy read, delements written    H (2 E + o d_c) s

At o 16, 3 heads, d_c 16 in bfloat16 that is 2,256 and 2,976 bytes with the 120 elements of the Cayley transform, 3,072
and 4,608 with the 256 of the constructions that take a full matrix.
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


def floor_of(inputs: Iterable[Tensor], output: Tensor, *, output_read: bool = False) -> Floor:
    """The floor of an operation whose inputs all get a gradient.

    output_read: its backward pass is given the output as well.
    """
    given, result = size_of(*inputs), size_of(output)
    return Floor(given + result, given + result + given + (result if output_read else 0))
