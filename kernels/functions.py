"""What torch.vmap does with operations and functions whose gradients are written by hand: a call for each sample, as
each may have weights, and gradients of them, of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def call_each(function: Callable, samples: int, in_dims: tuple, args: tuple) -> tuple[Any, Any]:
    """The outputs of all samples, stacked, and their dimensions of samples, as a rule of torch.vmap returns them.

    Args:
        function: returns a tensor or several.
        samples: how many.
        in_dims: the dimension of each argument along which samples lie, None for those that all share.
        args: the arguments.
    """
    outputs = []
    for sample in range(samples):
        one = (a if dim is None else a.select(dim, sample) for a, dim in zip(args, in_dims, strict=True))
        outputs.append(function(*one))
    if isinstance(outputs[0], Tensor):
        return torch.stack(outputs), 0
    stacked = tuple(map(torch.stack, zip(*outputs, strict=True)))
    return stacked, (0,) * len(stacked)


class Function(torch.autograd.Function):
    """A function that torch.func's transforms follow. Subclasses give `setup_context` beside a `forward` without a
    context, and a `backward` that writes into no tensor that depends on its arguments less than what it writes."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        return call_each(cls.apply, info.batch_size, in_dims, args)
