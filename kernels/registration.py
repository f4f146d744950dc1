"""Registers operations with PyTorch: what an operation takes, returns and has gradients of are NamedTuples, by name.

A registered operation stays whole under torch.compile, can be named in selective activation checkpointing, and is seen
by FLOP counters. torch.library wants flat lists of arguments and tensors where a result may be absent; `register` goes
from one to the other for all operations, and gives them torch.func's transforms.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, get_type_hints

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.functions import call_each


class Output(NamedTuple):
    """The result of an operation that has a single one."""

    y: Tensor


_SCHEMA_TYPES = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", str: "str"}


def register(
    name: str,
    forward: Callable[[Any], NamedTuple],
    like: Callable[[Any], NamedTuple],
    takes: type[NamedTuple],
    returns: type[NamedTuple],
    *,
    backward: Callable[[Any, Any, Any], dict[str, Tensor | None]] | None = None,
    without_gradient: tuple[str, ...] = (),
    kept: Callable[[Any], tuple[str, ...]] = lambda given: (),
    flops: Callable[..., int] | None = None,
    mutates: tuple[str, ...] = (),
) -> Callable[[Any], Any]:
    """Registers matmix::`name` and, with `backward`, matmix::`name`_backward, which has no derivative of its own.

    Args:
        name: of the operation.
        forward: given `takes`, computes `returns` from real tensors.
        like: the same for tensors without values, by shapes alone.
        takes: tensors, booleans, numbers and strings; annotated, with `| None` for what may be absent.
        returns: tensors, with `| None` for those that may be absent.
        backward: given `takes`, `returns` with the outputs that are kept (None for others), and `returns` with the
            gradients of the outputs (None where there is none), computes the gradients of the input tensors by name,
            each shaped and typed like its input and contiguous, None for inputs that are None.
        without_gradient: outputs, and besides cu_seqlens inputs, that nothing is differentiated by.
        kept: given `takes`, the names of the outputs that the backward pass needs. All input tensors are kept.
        flops: given `takes` with shapes in place of tensors, and `backward=True` for the backward pass, the number of
            floating-point operations.
        mutates: the inputs that are written to; such an operation has no backward pass.

    Returns:
        A function from `takes` to `returns`: the call of the registered operation. An output that is absent comes as
        a tensor without elements.
    """
    inputs = _schema(takes)
    results = "Tensor" if len(returns._fields) == 1 else f"({', '.join(['Tensor'] * len(returns._fields))})"

    def run(*arguments: Any) -> Any:
        given = takes(*arguments)
        return _flat(forward(given), given[0])

    def run_like(*arguments: Any) -> Any:
        given = takes(*arguments)
        return _flat(like(given), given[0])

    schema = f"({', '.join(_written(text, field in mutates) for field, text in inputs.items())}) -> {results}"
    operation = torch.library.custom_op(f"matmix::{name}", run, mutates_args=mutates, schema=schema)
    operation.register_fake(run_like)
    overload = operation._opoverload

    def call(given: Any) -> Any:
        results = overload(*given)
        return returns(*(results if isinstance(results, tuple) else (results,)))

    if flops is not None:
        register_flop_formula(overload._overloadpacket)(lambda *shapes, **_: flops(takes(*shapes), backward=False))
    if backward is not None:
        _register_backward(operation, takes, returns, backward, without_gradient, kept, flops)
    return call


def _register_backward(
    operation: CustomOpDef,
    takes: type[NamedTuple],
    returns: type[NamedTuple],
    backward: Callable,
    without_gradient: tuple[str, ...],
    kept: Callable,
    flops: Callable | None,
) -> None:
    """Registers the backward pass as an operation, and autograd's way to it."""
    nothing = returns(*[None] * len(returns._fields))
    may_be_absent = {field for field, kind in get_type_hints(returns).items() if kind != Tensor}
    tensors = [field for field, kind in get_type_hints(takes).items() if kind in (Tensor, Tensor | None)]
    differentiable = [field for field in returns._fields if field not in without_gradient]
    wanted = [field for field in tensors if field not in ("cu_seqlens", *without_gradient)]
    first_input = len(differentiable) + len(returns._fields)

    def run(*arguments: Any) -> Any:
        cotangents = nothing._replace(**dict(zip(differentiable, arguments, strict=False)))
        outputs, given = returns(*arguments[len(differentiable) : first_input]), takes(*arguments[first_input:])
        gradients = backward(given, outputs, cotangents)
        assert gradients.keys() == set(wanted), f"{operation._qualname}: gradients of {', '.join(gradients)}"
        return _flat(tuple(gradients[field] for field in wanted), given[0])

    def run_like(*arguments: Any) -> Any:
        given = takes(*arguments[first_input:])
        return _flat(tuple(_empty_like(getattr(given, field)) for field in wanted), given[0])

    before = [f"Tensor? d_{field}" for field in differentiable] + [f"Tensor? kept_{field}" for field in returns._fields]
    schema = f"({', '.join([*before, *_schema(takes).values()])}) -> ({', '.join(['Tensor'] * len(wanted))})"
    other = torch.library.custom_op(f"{operation._qualname}_backward", run, mutates_args=(), schema=schema)
    other.register_fake(run_like)
    overload = other._opoverload
    if flops is not None:
        register_flop_formula(overload._overloadpacket)(
            lambda *shapes, **_: flops(takes(*shapes[first_input:]), backward=True)
        )

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        given, outputs = takes(*inputs), returns(*(output if isinstance(output, tuple) else (output,)))
        names = kept(given)
        held = [
            x if field in names and not (field in may_be_absent and x.numel() == 0) else None
            for field, x in outputs._asdict().items()
        ]
        ctx.mark_non_differentiable(*(x for field, x in outputs._asdict().items() if field not in differentiable))
        # Of several outputs, those without a gradient get no zeros in its place.
        ctx.set_materialize_grads(len(returns._fields) == 1)
        ctx.save_for_backward(*held, *(getattr(given, field) for field in tensors))
        ctx.given = given._replace(**dict.fromkeys(tensors))

    def gradient(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        held, given = saved[: len(returns._fields)], saved[len(returns._fields) :]
        given = ctx.given._replace(**dict(zip(tensors, given, strict=True)))
        those = [x for field, x in zip(returns._fields, cotangents, strict=True) if field in differentiable]
        gradients = dict(zip(wanted, overload(*those, *held, *given), strict=True))
        return tuple(None if x is None else gradients.get(field) for field, x in given._asdict().items())

    operation.register_autograd(gradient, setup_context=setup)


def _schema(takes: type[NamedTuple]) -> dict[str, str]:
    """The arguments as torch.library writes them, by name."""
    arguments = {}
    for field, kind in get_type_hints(takes).items():
        plain = next((known for known in _SCHEMA_TYPES if kind in (known, known | None)), None)
        assert plain is not None, f"{takes.__name__}.{field} is a {kind}"
        arguments[field] = f"{_SCHEMA_TYPES[plain]}{'' if kind is plain else '?'} {field}"
    return arguments


def _written(argument: str, mutated: bool) -> str:
    return argument.replace("Tensor", "Tensor(a!)", 1) if mutated else argument


def _flat(results: tuple, first: Tensor) -> Any:
    """The results as torch.library takes them: an empty tensor in place of None, and a single tensor by itself."""
    tensors = tuple(first.new_empty(0) if x is None else x for x in results)
    return tensors if len(tensors) > 1 else tensors[0]


def _empty_like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


def finish_registration() -> None:
    """Once all operations are registered: lets torch.func's transforms through those that change none of their inputs,
    and keeps torch's compiler out of processes that compile nothing."""
    for name, operation in list(OPDEFS.items()):
        if not name.startswith("matmix::"):
            continue
        if not operation._opoverload._schema.is_mutable:
            _replace_autograd(operation)
            operation.register_vmap(_vmap_rule(operation))
        for run in operation._backend_fns.values():
            _run_plainly(inspect.unwrap(run))


def _replace_autograd(operation: CustomOpDef) -> None:
    """Replaces the autograd kernel that torch.library makes.

    That is an autograd.Function whose `forward` fills its own context, which torch.func's transforms (grad, vjp,
    jacrev, vmap and what is made of them) refuse. The kernel that dispatches to it is called once for each level of
    transforms with the tensors of that level, so that a Function of a single level belongs there. In all else it is
    what torch.library registers.
    """
    name = operation._name

    def below(keyset: Any, args: tuple) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operation._opoverload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    class Differentiable(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *args, keyset = args
            if torch._C._are_functorch_transforms_active():
                # This level must not follow what runs in here, but the levels around it must.
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    output = below(keyset, args)
            else:
                output = below(keyset, args)
            if operation._setup_context_fn is not None:
                with torch._C._AutoDispatchBelowAutograd():
                    operation._setup_context_fn(ctx=ctx, inputs=tuple(args), output=output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
            if operation._backward_fn is None:
                raise ValueError(
                    f"{name.removesuffix('_backward')}: a derivative of its gradient is asked for, and this op has "
                    "none; its definition (definition.py) has derivatives of all orders, in float64 and slowly"
                )
            return *operation._backward_fn(ctx, *gradients), None

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
            raise ValueError(
                f"{name}: an input has a tangent, and this op has no forward-mode derivative; use reverse mode "
                "(backward, torch.func.vjp or jacrev)"
            )

    def kernel(keyset: Any, *args: Any) -> Any:
        followed = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        if not followed and forward_ad._current_level < 0:
            return below(keyset, args)
        if not torch._C._are_functorch_transforms_active():
            return Differentiable.apply(*args, keyset)
        with enable_single_level_autograd_function():
            return Differentiable.apply(*args, keyset)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        operation._lib.impl(name, kernel, "Autograd", with_keyset=True, allow_override=True)


def _vmap_rule(operation: CustomOpDef) -> Callable:
    def rule(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return call_each(operation._opoverload, info.batch_size, in_dims, args)

    return rule


def _run_plainly(function: Any) -> None:
    """Puts the function itself where torch keeps it with the compiler switched off, until the first call at which there
    is a compiler. torch would import the compiler to switch it off, which takes a second."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        from torch._dynamo import disable

        function.__dynamo_disable = disable(function, wrapping=False)
        return function.__dynamo_disable(*args, **kwargs)

    function.__dynamo_disable = run
