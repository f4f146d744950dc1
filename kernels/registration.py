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

from matmix.kernels.backend import Forms, check_backend
from matmix.kernels.checks import check_no_gradients, check_own_memory, transformed, wants_gradients
from matmix.kernels.functions import Form, Operation, Output, call_each

_SCHEMA_TYPES = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", str: "str"}


def register(
    operation: Operation,
    triton: str,
    like: Callable[[Any, bool], Any],
    *,
    flops: Callable[..., int] | None = None,
    why_not: Callable[[Any], str] = lambda given: "",
    suffix: str = "",
    mutates: str = "",
    listed: bool = True,
) -> Callable[..., Any]:
    """Registers matmix::`name` and, with gradients, matmix::`name`_backward, which has no derivative of its own.

    Args:
        operation: takes one more argument when it is registered, the `backend`, if it has a PyTorch form.
        triton: the module, below `matmix.kernels`, that is the Triton form; it is imported when it is first needed.
        like: the outputs for tensors without values, by shapes alone; it is also told whether the Triton form runs.
        flops: given `takes` with shapes in place of tensors, and `backward=True` for the backward pass, the number of
            floating-point operations.
        why_not: given `takes`, says what about it the Triton form cannot do, if anything.
        suffix: what the names of the Triton form's functions end with.
        mutates: an input that is written to; such an operation has no gradients.
        listed: whether the operation stands in `TRITON_FORMS`.

    Returns:
        A function from `takes` and the backend to `returns`, which calls the registered operation. An output that is
        absent comes as a tensor without elements. Raises ValueError for a backend that cannot be had.
    """
    forms = Forms(operation, triton, why_not, suffix, listed)
    chooses, returned = operation.torch is not None, len(operation.returns._fields)
    inputs = [
        f"{'Tensor(a!)' if field == mutates else kind} {field}" for field, kind in _schema(operation.takes).items()
    ]
    inputs += ["str backend"] * chooses
    # What stands before the inputs of the backward pass.
    before = [f"Tensor? d_{field}" for field in operation.differentiable]
    before += [f"Tensor? kept_{field}" for field in operation.returns._fields]

    def apart(arguments: tuple) -> tuple[Any, str]:
        return (operation.takes(*arguments[:-1]), arguments[-1]) if chooses else (operation.takes(*arguments), "triton")

    def define(name: str, arguments: list[str], results: int, run: Callable, run_like: Callable) -> CustomOpDef:
        """Registers a function and what stands in for it without values; both are given (what comes before the inputs,
        inputs, backend)."""
        first = len(arguments) - len(inputs)
        schema = f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"

        def with_names(function: Callable) -> Callable:
            def flat(*given: Any) -> Any:
                named, backend = apart(given[first:])
                tensors = function(given[:first], named, backend)
                tensors = tensors if isinstance(tensors, tuple) else (tensors,)
                # torch.library takes an empty tensor in place of None, and a single tensor by itself.
                tensors = tuple(named[0].new_empty(0) if x is None else x for x in tensors)
                return tensors if results > 1 else tensors[0]

            return flat

        mutated = (mutates,) if mutates else ()
        defined = torch.library.custom_op(f"matmix::{name}", with_names(run), mutates_args=mutated, schema=schema)
        defined.register_fake(with_names(run_like))
        if flops is not None:
            register_flop_formula(defined._opoverload._overloadpacket)(
                lambda *shapes, **_: flops(apart(shapes[first:])[0], backward=first > 0)
            )
        return defined

    forward = define(
        operation.name, inputs, returned,
        lambda _, given, backend: operation.forward(forms.choose(backend, given), given),
        lambda _, given, backend: like(given, forms.is_fused(backend, given)),
    )  # fmt: skip
    overload = forward._opoverload

    def call(given: Any, backend: str = "auto") -> Any:
        if chooses:
            check_backend(operation.name, backend, given[0], why_not(given))
        return operation.outputs(overload(*given, *[backend] * chooses))

    if operation.backward is None:
        return call
    backward = define(
        f"{operation.name}_backward", [*before, *inputs], len(operation.wanted),
        lambda first, given, backend: operation.run_backward(forms.choose(backend, given), *first, *given),
        lambda _, given, backend: tuple(_empty_like(getattr(given, field)) for field in operation.wanted),
    )._opoverload  # fmt: skip

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        given, ctx.backend = apart(inputs)
        operation.keep(ctx, given, output)

    def gradient(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        def run(*given: Any) -> tuple:
            gradients = backward(*given, *[ctx.backend] * chooses)
            return gradients if isinstance(gradients, tuple) else (gradients,)

        return *operation.gradients(ctx, cotangents, run), *[None] * chooses

    forward.register_autograd(gradient, setup_context=setup)
    return call


class Stepped(NamedTuple):
    """The results of one token."""

    y: Tensor
    state: Tensor


def register_step(name: str, takes: type, form: Form, triton: str, flops: Callable[..., int]) -> Callable[..., Any]:
    """Registers matmix::`name`, which takes one token from a `state` to the next, and matmix::`name`_, which writes the
    new state into the given one. A form's `forward` is given `takes` and whether it does so.

    Returns:
        A function from `takes`, whether to write in place and the backend to (y, state), which raises ValueError where
        these do not fit. Where a derivative is asked for it runs the PyTorch form.
    """

    def empty_like(given: Any) -> Stepped:
        return Stepped(_empty_like(given[0]), _empty_like(given.state))

    copying = Operation(
        name, takes, Stepped, form, backward=None,
        forward=lambda form, given: tuple(x.contiguous() for x in form.forward(given, False)),
    )  # fmt: skip
    writing = Operation(
        f"{name}_", takes, Output, form, backward=None,
        forward=lambda form, given: form.forward(given, True)[0].contiguous(),
    )  # fmt: skip
    copy = register(copying, triton, lambda given, _: empty_like(given), flops=flops)
    write = register(writing, triton, lambda given, _: empty_like(given).y, flops=flops, mutates="state", listed=False)

    def step(given: Any, in_place: bool, backend: str) -> tuple[Tensor, Tensor]:
        check_backend(name, backend, given[0])
        tensors = [x for x in given if isinstance(x, Tensor)]
        check_no_gradients(name, in_place, backend, *tensors)
        if in_place:
            check_own_memory(name, "state", given.state)
            return write(given, backend).y, given.state
        if wants_gradients(*tensors) or transformed():
            return form.forward(given, False)
        return tuple(copy(given, backend))

    return step


def _schema(takes: type) -> dict[str, str]:
    """The arguments' types as torch.library writes them, by name."""
    arguments = {}
    for field, kind in get_type_hints(takes).items():
        plain = next((known for known in _SCHEMA_TYPES if kind in (known, known | None)), None)
        assert plain is not None, f"{takes.__name__}.{field} is a {kind}"
        arguments[field] = f"{_SCHEMA_TYPES[plain]}{'' if kind is plain else '?'}"
    return arguments


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
