"""The short depthwise convolution as an op: checks, backend choice, registration with PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.backend import check_backend, implementation
from matmix.kernels.checks import check_cu_seqlens, check_floating, check_shape
from matmix.kernels.short_conv import from_state as _from_state  # noqa: F401 - registers the op
from matmix.kernels.short_conv.chunked import conv_backward, conv_forward


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
        return torch.ops.matmix.short_conv(x, weight, bias, causal, activation, cu_seqlens, backend)
    state = x.new_zeros(x.shape[0], x.shape[2], width - 1) if initial_state is None else initial_state
    y, final = torch.ops.matmix.short_conv_from_state(x, weight, bias, state, activation, backend)
    return (y, final) if return_final_state else y


@torch.library.custom_op("matmix::short_conv", mutates_args=())
def _short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    causal: bool,
    activation: str | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> Tensor:
    run = implementation("short_conv", "forward", conv_forward, backend, x)
    return run(x, weight, bias, causal, activation, cu_seqlens)


@_short_conv.register_fake
def _(x, *args):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("matmix::short_conv_backward", mutates_args=())
def _short_conv_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    causal: bool,
    activation: str | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    run = implementation("short_conv", "backward", conv_backward, backend, x)
    dx, dweight, dbias = run(dy, x, weight, bias, causal, activation, cu_seqlens)
    return dx, dweight, x.new_empty(0) if dbias is None else dbias


@_short_conv_backward.register_fake
def _(dy, x, weight, bias, causal, activation, cu_seqlens, backend):
    like = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight))
    return *like, x.new_empty(0) if bias is None else torch.empty_like(bias)


def _setup(ctx, inputs, output):
    x, weight, bias, ctx.causal, ctx.activation, cu_seqlens, ctx.backend = inputs
    ctx.save_for_backward(x, weight, bias, cu_seqlens)


def _gradient(ctx, dy):
    x, weight, bias, cu_seqlens = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.matmix.short_conv_backward(
        dy, x, weight, bias, ctx.causal, ctx.activation, cu_seqlens, ctx.backend
    )
    return dx, dweight, None if bias is None else dbias, None, None, None, None


_short_conv.register_autograd(_gradient, setup_context=_setup)


@register_flop_formula(torch.ops.matmix.short_conv)
def _(x_shape, weight_shape, *args, **kwargs) -> int:
    batch, seqlen, _ = x_shape
    return 2 * batch * seqlen * weight_shape[0] * weight_shape[1]


@register_flop_formula(torch.ops.matmix.short_conv_backward)
def _(dy_shape, x_shape, weight_shape, *args, **kwargs) -> int:
    batch, seqlen, _ = x_shape
    return 2 * 2 * batch * seqlen * weight_shape[0] * weight_shape[1]
