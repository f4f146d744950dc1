"""The short depthwise convolution as ops, over a sequence, from a state to a state and for a single token: checks,
backend choice, registration with PyTorch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.backend import Forms, check_backend
from matmix.kernels.checks import (
    check_choice,
    check_cu_seqlens,
    check_finite,
    check_floating,
    check_no_gradients,
    check_own_memory,
    check_shape,
    transformed,
    wants_gradients,
)
from matmix.kernels.registration import Output, register
from matmix.kernels.short_conv.chunked import (
    conv_backward,
    conv_forward,
    conv_from_state_backward,
    conv_from_state_forward,
    conv_step_forward,
    short_conv_step_torch,
)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise convolution over time: y_t = sum over taps j of weight[:, j] x_{t + j - left}, plus bias,
    activated.

    Args:
        x: (batch, seqlen, d).
        weight: (d, width), width 2 to 9; `left` is width - 1 if `causal`, else width // 2 (width then odd).
        bias: (d,) or None.
        activation: None or "silu".
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1); beyond
            them, as beyond the sequence's ends, x counts as zero.
        initial_state: the inputs of the width - 1 tokens before the first, the oldest first, (batch, d, width - 1);
            None for zeros. With `causal=True` and without `cu_seqlens` only. The PyTorch form puts it before a copy of
            x; the Triton form copies nothing.
        return_final_state: also return the inputs of the last width - 1 tokens, as `initial_state` and
            `short_conv_step` take them; under the same conditions.
        backend: "auto", "torch" or "triton".

    Returns:
        (batch, seqlen, d) typed like x; sums are float32 (float64 for float64 inputs). With `return_final_state` also
        the state (batch, d, width - 1), typed like the given one or else like x.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "short_conv"
    check_floating(op, x=x, weight=weight, bias=bias, initial_state=initial_state)
    if x.dim() != 3 or 0 in x.shape:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (batch, seqlen, d), none of them 0")
    width = weight.shape[-1]
    check_shape(op, "weight", weight, (x.shape[2], width))
    if not 2 <= width <= 9:
        raise ValueError(f"{op}: weight has {width} taps; give 2 to 9")
    if not causal and width % 2 == 0:
        raise ValueError(f"{op}: a centred convolution needs an odd number of taps, got {width}; or use causal=True")
    if bias is not None:
        check_shape(op, "bias", bias, (x.shape[2],))
    if activation not in (None, "silu"):
        raise ValueError(f'{op}: activation is {activation!r}; use None or "silu"')
    check_cu_seqlens(op, cu_seqlens, x.shape[0], x.shape[1], x)
    if initial_state is not None or return_final_state:
        what = "return_final_state" if initial_state is None else "initial_state"
        if not causal:
            raise ValueError(f"{op}: {what} needs causal=True; a centred convolution has no state")
        if cu_seqlens is not None:
            raise ValueError(f"{op}: {what} and cu_seqlens are both given; give each document as a row of its own")
    if initial_state is not None:
        check_shape(op, "initial_state", initial_state, (x.shape[0], x.shape[2], width - 1))
    check_backend(op, backend, x)

    if initial_state is None and not return_final_state:
        return _short_conv(Inputs(x, weight, bias, causal, activation, cu_seqlens, backend)).y
    state = x.new_zeros(x.shape[0], x.shape[2], width - 1) if initial_state is None else initial_state
    y, final = _from_state(StateInputs(x, weight, bias, state, activation, backend))
    return (y, final) if return_final_state else y


def short_conv_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Does to one token what `short_conv` with `causal=True` does to a sequence: y = weight . [state | x] in each
    channel, plus bias, activated.

    The Triton form is one launch, waits for nothing, and can be captured in a CUDA graph.

    Args:
        x: (batch, d).
        state: the inputs of the width - 1 tokens before, the oldest first, (batch, d, width - 1); zeros at first.
        weight: (d, width), width 2 to 9.
        bias: (d,) or None.
        activation: None or "silu".
        in_place: write the new state into the memory of `state`, which is then what is returned; else `state` is left
            as it is.
        backend: "auto", "torch" or "triton".

    Returns:
        y (batch, d) typed like x, and [state | x] without its oldest token, shaped and typed like `state`. Sums are
        float32 (float64 for float64 inputs). Gradients come from the PyTorch form: where an input requires one, "auto"
        takes it, and "triton" and `in_place` are errors.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "short_conv_step"
    for name, tensor in {"x": x, "state": state, "weight": weight}.items():
        if tensor is None:
            raise ValueError(f"{op}: {name} is None; give a floating-point tensor")
    given = {"x": x, "state": state, "weight": weight, "bias": bias}
    check_floating(op, **given)
    if x.dim() != 2 or 0 in x.shape:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (batch, d), none of them 0")
    width = weight.shape[-1]
    check_shape(op, "weight", weight, (x.shape[1], width))
    if not 2 <= width <= 9:
        raise ValueError(f"{op}: weight has {width} taps; give 2 to 9")
    if bias is not None:
        check_shape(op, "bias", bias, (x.shape[1],))
    check_shape(op, "state", state, (*x.shape, width - 1))
    check_choice(op, "activation", activation, (None, "silu"))
    check_finite(op, **given)
    check_backend(op, backend, x)
    check_no_gradients(op, in_place, backend, *given.values())
    if in_place:
        check_own_memory(op, "state", state)
        return _step_in_place(StepInputs(x, state, weight, bias, activation, backend)).y, state
    if wants_gradients(*given.values()) or transformed():
        return short_conv_step_torch(x, state, weight, bias, activation=activation)
    return _step(StepInputs(x, state, weight, bias, activation, backend))


class Inputs(NamedTuple):
    """The arguments of matmix::short_conv."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    causal: bool
    activation: str | None
    cu_seqlens: Tensor | None
    backend: str


FORMS = Forms("short_conv", "short_conv.fused", conv_forward, conv_backward)


def _forward(given: Inputs) -> Output:
    return Output(FORMS.choose("forward", given.backend, given.x)(*given[:6]))


def _backward(given: Inputs, _: Output, cotangents: Output) -> dict[str, Tensor | None]:
    dx, dweight, dbias = FORMS.choose("backward", given.backend, given.x)(cotangents.y, *given[:6])
    return {"x": dx, "weight": dweight, "bias": dbias}


def _like(given: Inputs) -> Output:
    return Output(torch.empty_like(given.x, memory_format=torch.contiguous_format))


def _flops(given: Inputs | StateInputs, *, backward: bool) -> int:
    """A multiply-add per tap; backward one for the gradient of x and one for the taps'."""
    batch, seqlen, _ = given.x
    return (2 if backward else 1) * 2 * batch * seqlen * math.prod(given.weight)


_short_conv = register("short_conv", _forward, _like, Inputs, Output, backward=_backward, flops=_flops)


class StateInputs(NamedTuple):
    """The arguments of matmix::short_conv_from_state."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    activation: str | None
    backend: str


class StateOutputs(NamedTuple):
    """The results of the operations that carry a state on."""

    y: Tensor
    state: Tensor


STATE_FORMS = Forms(
    "short_conv_from_state", "short_conv.fused", conv_from_state_forward, conv_from_state_backward, "_from_state"
)


def _state_forward(given: StateInputs) -> StateOutputs:
    return StateOutputs(*STATE_FORMS.choose("forward", given.backend, given.x)(*given[:5]))


def _state_backward(given: StateInputs, _: StateOutputs, cotangents: StateOutputs) -> dict[str, Tensor | None]:
    run = STATE_FORMS.choose("backward", given.backend, given.x)
    dy, dstate = (
        torch.zeros_like(x) if gradient is None else gradient
        for gradient, x in zip(cotangents, (given.x, given.state), strict=True)
    )
    dx, dweight, dbias, dstate = run(dy, dstate, *given[:5])
    return {"x": dx, "weight": dweight, "bias": dbias, "state": dstate}


def _state_like(given: StateInputs | StepInputs) -> StateOutputs:
    return StateOutputs(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (given.x, given.state)))


_from_state = register(
    "short_conv_from_state", _state_forward, _state_like, StateInputs, StateOutputs,
    backward=_state_backward, flops=_flops,
)  # fmt: skip


class StepInputs(NamedTuple):
    """The arguments of matmix::short_conv_step, and of short_conv_step_, which writes into the state."""

    x: Tensor
    state: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None
    backend: str


STEP_FORMS = Forms("short_conv_step", "short_conv.fused_step", conv_step_forward)


def _step_forward(given: StepInputs) -> StateOutputs:
    y, state = STEP_FORMS.choose("forward", given.backend, given.x)(*given[:5], False)
    return StateOutputs(y.contiguous(), state.contiguous())


def _step_forward_in_place(given: StepInputs) -> Output:
    return Output(STEP_FORMS.choose("forward", given.backend, given.x)(*given[:5], True)[0].contiguous())


def _step_flops(given: StepInputs, *, backward: bool) -> int:
    return 2 * given.x[0] * math.prod(given.weight)


_step = register("short_conv_step", _step_forward, _state_like, StepInputs, StateOutputs, flops=_step_flops)
_step_in_place = register(
    "short_conv_step_", _step_forward_in_place, _like, StepInputs, Output, flops=_step_flops, mutates=("state",)
)
