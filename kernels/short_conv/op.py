"""The short depthwise convolution as ops, over a sequence, from a state to a state and for a single token: checks,
backend choice, registration with PyTorch."""

import math

import torch
from torch import Tensor

from matmix.kernels.checks import check_choice, check_cu_seqlens, check_finite, check_floating, check_given, check_shape
from matmix.kernels.context import Context, context_name
from matmix.kernels.functions import Form
from matmix.kernels.registration import register, register_step
from matmix.kernels.short_conv.chunked import (
    SHORT_CONV,
    STATE_CONV,
    ConvStepInputs,
    StateConvInputs,
    conv_step_forward,
)
from matmix.kernels.short_conv.parts import ConvInputs


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
    context: Context | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise convolution over time: y_t = sum over taps j of weight[:, j] x_{t + j - left}, plus bias, activated.

    Args:
        x: (batch, seqlen, d).
        weight: (d, width), width 2 to 9; `left` is width - 1 if `causal`, else width // 2 (width then odd).
        bias: (d,) or None.
        activation: None or "silu".
        cu_seqlens: int32 (documents + 1,), boundaries of documents packed into one row (batch 1); beyond them, as
            beyond the sequence's ends, x counts as zero.
        initial_state: the inputs of the width - 1 tokens before the first, the oldest first, (batch, d, width - 1);
            None for zeros. With `causal=True` and without `cu_seqlens` only. The PyTorch form puts it before a copy of
            x; the Triton form copies nothing.
        return_final_state: also return the inputs of the last width - 1 tokens, as `initial_state` and
            `short_conv_step` take them; under the same conditions.
        context: the ranks that hold the other parts of the rows (see `matmix.kernels.context`), None for whole rows; x
            is then at least width - 1 tokens, and ranks send their neighbours that many. Without states.
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
    _check_taps(op, x.shape[2], weight, bias, activation)
    if not causal and width % 2 == 0:
        raise ValueError(f"{op}: a centred convolution needs an odd number of taps, got {width}; or use causal=True")
    check_cu_seqlens(op, cu_seqlens, x.shape[0], x.shape[1], x, part=context is not None)
    if context is not None:
        check_reach(op, x.shape[1], width)
    if initial_state is not None or return_final_state:
        what = "return_final_state" if initial_state is None else "initial_state"
        if not causal:
            raise ValueError(f"{op}: {what} needs causal=True; a centred convolution has no state")
        if context is not None:
            raise ValueError(f"{op}: {what} and context are both given; give whole rows where there are states")
        if cu_seqlens is not None:
            raise ValueError(f"{op}: {what} and cu_seqlens are both given; give each document as a row of its own")
    if initial_state is not None:
        check_shape(op, "initial_state", initial_state, (x.shape[0], x.shape[2], width - 1))
    if initial_state is None and not return_final_state:
        given = ConvInputs(x, weight, bias, causal, activation, cu_seqlens, context_name(context))
        return _short_conv(given, backend).y
    state = x.new_zeros(x.shape[0], x.shape[2], width - 1) if initial_state is None else initial_state
    y, final = _from_state(StateConvInputs(x, weight, bias, state, activation), backend)
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
    check_given(op, x=x, state=state, weight=weight)
    given = {"x": x, "state": state, "weight": weight, "bias": bias}
    check_floating(op, **given)
    if x.dim() != 2 or 0 in x.shape:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (batch, d), none of them 0")
    width = weight.shape[-1]
    _check_taps(op, x.shape[1], weight, bias, activation)
    check_shape(op, "state", state, (*x.shape, width - 1))
    check_finite(op, **given)
    return _step(ConvStepInputs(x, state, weight, bias, activation), in_place, backend)


def check_reach(op: str, tokens: int, width: int) -> None:
    """A part of a row holds what the taps at the edge of the next one reach."""
    if tokens < width - 1:
        raise ValueError(
            f"{op}: this part of a row has {tokens} tokens, and {width} taps need at least {width - 1}; cut rows into "
            "fewer parts"
        )


def _check_taps(op: str, channels: int, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    width = weight.shape[-1]
    check_shape(op, "weight", weight, (channels, width))
    if not 2 <= width <= 9:
        raise ValueError(f"{op}: weight has {width} taps; give 2 to 9")
    if bias is not None:
        check_shape(op, "bias", bias, (channels,))
    check_choice(op, "activation", activation, (None, "silu"))


def _flops(given: ConvInputs | StateConvInputs, *, backward: bool) -> int:
    """A multiply-add per tap; backward one for the gradient of x and one for the taps'."""
    batch, seqlen, _ = given.x
    return (2 if backward else 1) * 2 * batch * seqlen * math.prod(given.weight)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_short_conv = register(SHORT_CONV, "short_conv.fused", lambda given, _: _like(given.x), flops=_flops)
_from_state = register(
    STATE_CONV, "short_conv.fused", lambda given, _: (_like(given.x), _like(given.state)), flops=_flops,
    suffix="_from_state",
)  # fmt: skip
_step = register_step(
    "short_conv_step", ConvStepInputs, Form(conv_step_forward), "short_conv.fused_step",
    lambda given, backward: 2 * given.x[0] * math.prod(given.weight),
)  # fmt: skip
