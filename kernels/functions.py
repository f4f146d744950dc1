"""Functions that the PyTorch forms of all operations share: the precision they compute in, pieces of work that fit a
cache, and functions whose gradients are written by hand, as torch.func's transforms see them.

torch.vmap calls such functions, as it calls registered operations, once for each sample: each may have weights, and
gradients of them, of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, get_type_hints

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


def working_dtype(x: Tensor) -> torch.dtype:
    """The precision that operations compute in: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def working(x: Tensor) -> Tensor:
    """x in that precision."""
    return x.to(working_dtype(x))


def cache_blocks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Slices over `rows` rows of `width` numbers: about 256 kB each on a CPU, one slice on other devices."""
    step = max(1, (1 << 16) // max(width, 1)) if device.type == "cpu" else max(rows, 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def lane_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a (n, k, ...) times b (k, m, ...): small matrices, whose numbers lie beside those of the others."""
    out = torch.mul(a[:, 0, None], b[None, 0], out=out)
    for k in range(1, len(b)):
        out.addcmul_(a[:, k, None], b[None, k])
    return out


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
    """A function that torch.func's transforms follow. Subclasses give a `forward` without a context, and a `backward`
    that writes into no tensor that depends on its arguments less than what it writes."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Keeps the tensors that were given."""
        ctx.save_for_backward(*(one for one in inputs if isinstance(one, Tensor)))

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


class Output(NamedTuple):
    """The result of an operation that has a single one."""

    y: Tensor


class Form(NamedTuple):
    """One way to compute an operation, in PyTorch or in Triton, whose module is such a form too."""

    forward: Callable
    """Given what the operation takes, computes what it returns, as a tuple; a single tensor by itself."""
    backward: Callable | None = None
    """Given the same, the outputs that are kept (None for others) and the gradients of the outputs (None where there is
    none), computes the gradients of the input tensors, each shaped and typed like its input and contiguous, None for
    inputs that are None."""


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation by names: NamedTuples of what it takes and returns, annotated with `| None` for what may be absent.
    It takes tensors, first of all one that is always there, booleans, numbers and strings."""

    name: str
    takes: type
    returns: type
    torch: Form | None = None
    """In PyTorch; None where the operation runs in Triton only."""
    without_gradient: tuple[str, ...] = ()
    """Outputs, and besides cu_seqlens inputs, that nothing is differentiated by."""
    kept: Callable[[Any], tuple[str, ...]] = lambda given: ()
    """Given `takes`, the names of the outputs that the backward pass needs. All input tensors are kept."""
    forward: Callable = lambda form, given: form.forward(given)
    """The forward pass by a form, where that is more than calling it."""
    backward: Callable | None = lambda form, given, outputs, cotangents: form.backward(given, outputs, cotangents)
    """The same for the backward pass; None for an operation without gradients."""

    @functools.cached_property
    def differentiable(self) -> list[str]:
        """The outputs that have gradients."""
        return [field for field in self.returns._fields if field not in self.without_gradient]

    @functools.cached_property
    def tensors(self) -> list[str]:
        """The inputs that are tensors."""
        return [field for field, kind in get_type_hints(self.takes).items() if kind in (Tensor, Tensor | None)]

    @functools.cached_property
    def wanted(self) -> list[str]:
        """The inputs that have gradients."""
        return [field for field in self.tensors if field not in ("cu_seqlens", *self.without_gradient)]

    def outputs(self, results: Any) -> Any:
        """What the operation returns, from a tuple or a single tensor."""
        return self.returns(*(results if isinstance(results, tuple) else (results,)))

    def keep(self, ctx: Any, inputs: tuple, results: Any) -> None:
        """Puts what the backward pass needs into the context of an autograd.Function."""
        given, outputs = self.takes(*inputs), self.outputs(results)
        hints, names = get_type_hints(self.returns), self.kept(given)
        held = []
        for field, x in outputs._asdict().items():
            absent = x is None or (hints[field] != Tensor and x.numel() == 0)
            held.append(x if field in names and not absent else None)
        fixed = (getattr(outputs, field) for field in outputs._fields if field not in self.differentiable)
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        # Of several outputs, those without a gradient get no zeros in its place.
        ctx.set_materialize_grads(len(outputs) == 1)
        ctx.save_for_backward(*held, *(getattr(given, field) for field in self.tensors))
        ctx.given = given._replace(**dict.fromkeys(self.tensors))

    def gradients(self, ctx: Any, cotangents: tuple, run: Callable) -> tuple:
        """The gradients of all inputs. `run` computes those of the wanted ones, from the gradients of the
        differentiable outputs, all outputs (None where they are not kept) and the inputs, one after the other."""
        saved, count = ctx.saved_tensors, len(cotangents)
        held, given = saved[:count], ctx.given._replace(**dict(zip(self.tensors, saved[count:], strict=True)))
        those = (x for field, x in zip(self.returns._fields, cotangents, strict=True) if field in self.differentiable)
        by_name = dict(zip(self.wanted, run(*those, *held, *given), strict=True))
        return tuple(by_name.get(field) if x is not None else None for field, x in given._asdict().items())

    def run_backward(self, form: Form, *arguments: Any) -> tuple:
        """The gradients of the wanted inputs by a form, from what `gradients` passes to `run`."""
        own = len(self.differentiable)
        first = own + len(self.returns._fields)
        given, outputs = self.takes(*arguments[first:]), self.returns(*arguments[own:first])
        cotangents = outputs._replace(**dict.fromkeys(outputs._fields))
        cotangents = cotangents._replace(**dict(zip(self.differentiable, arguments, strict=False)))
        return self.backward(form, given, outputs, cotangents)


def in_pytorch(operation: Operation) -> Callable[[Any], Any]:
    """Returns the PyTorch form of an operation as a function from what it takes to what it returns, which autograd and
    torch.func's transforms follow."""

    def gradient(*arguments: Any) -> tuple:
        return operation.run_backward(operation.torch, *arguments)

    class Differentiable(Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operation.forward(operation.torch, operation.takes(*arguments))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
            operation.keep(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
            return operation.gradients(ctx, cotangents, lambda *given: gradient_of(gradient, *given))

    return lambda given: operation.outputs(Differentiable.apply(*given))
