"""Functions that the PyTorch forms of all operations share: the precision they compute in, pieces of work that fit a
cache, and functions whose gradients are written by hand, as torch.func's transforms see them.

torch.vmap calls such functions, as it calls registered operations, once for each sample: each may have weights, and
gradients of them, of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from matmix.kernels.checks import transformed


def outside_autocast(function: Callable) -> Callable:
    """Runs `function` with autocast off for the device of its first tensor, or of the first one that begins a tuple.

    The PyTorch forms compute in float32 (or float64) whatever their inputs are; autocast would reach into them
    and round their products to bfloat16.
    """

    @functools.wraps(function)
    def run(*arguments, **options):
        firsts = (x[0] if isinstance(x, tuple) and x else x for x in arguments)
        device = next(x.device.type for x in firsts if isinstance(x, torch.Tensor))
        if device == "meta" or not torch.is_autocast_enabled(device):
            return function(*arguments, **options)
        with torch.autocast(device, enabled=False):
            return function(*arguments, **options)

    return run


def working(x: torch.Tensor) -> torch.Tensor:
    """float32, or float64 for float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cache_blocks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Slices over `rows` rows of `width` numbers: about 256 kB each on a CPU, one slice on other devices."""
    step = max(1, (1 << 16) // max(width, 1)) if device.type == "cpu" else max(rows, 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def call_each(function: Callable, samples: int, in_dims: tuple, args: tuple) -> tuple[Any, Any]:
    """The outputs of all samples, stacked, and their dimensions of samples, as a rule of torch.vmap returns them.

    Args:
        function: returns a tensor, or several tensors or None.
        samples: how many.
        in_dims: the dimension of each argument along which samples lie, anything but a number for those that all share.
        args: the arguments.
    """
    outputs = []
    for sample in range(samples):
        one = (a.select(dim, sample) if isinstance(dim, int) else a for a, dim in zip(args, in_dims, strict=True))
        outputs.append(function(*one))
    if isinstance(outputs[0], Tensor):
        return torch.stack(outputs), 0
    stacked = tuple(None if of_all[0] is None else torch.stack(of_all) for of_all in zip(*outputs, strict=True))
    return stacked, tuple(None if output is None else 0 for output in stacked)


class Function(torch.autograd.Function):
    """A function that torch.func's transforms follow. Subclasses give `setup_context` beside a `forward` without a
    context, and a `backward` that writes into no tensor that depends on its arguments less than what it writes."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        return call_each(cls.apply, info.batch_size, in_dims, args)


class Gradient(Function):
    """`gradient(*arguments)`, which has no derivative."""

    @staticmethod
    def forward(gradient: Callable, *arguments: Any) -> tuple[Tensor | None, ...]:
        return gradient(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.of = inputs[0].__name__

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        raise ValueError(f"{ctx.of}: a derivative of this gradient is asked for, and there is none")


def gradient_of(gradient: Callable, *arguments: Any) -> tuple[Tensor | None, ...]:
    """`gradient(*arguments)` in a `backward`: several tensors or None, whose own derivatives are errors."""
    if transformed():
        return Gradient.apply(gradient, *arguments)
    return once_differentiable(lambda _, *given: gradient(*given))(None, *arguments)
