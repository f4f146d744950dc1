"""Registers the causal short convolution that goes on after a state; `short_conv` checks its arguments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.backend import implementation
from matmix.kernels.short_conv.chunked import conv_from_state_backward, conv_from_state_forward


@torch.library.custom_op("matmix::short_conv_from_state", mutates_args=())
def _from_state(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None, backend: str
) -> tuple[Tensor, Tensor]:
    run = implementation("short_conv_from_state", "forward", conv_from_state_forward, backend, x)
    return run(x, weight, bias, state, activation)


@_from_state.register_fake
def _(x, weight, bias, state, *_):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, state))


@torch.library.custom_op("matmix::short_conv_from_state_backward", mutates_args=())
def _from_state_backward(
    dy: Tensor,
    dfinal: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    activation: str | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    run = implementation("short_conv_from_state", "backward", conv_from_state_backward, backend, x)
    dx, dweight, dbias, dstate = run(dy, dfinal, x, weight, bias, state, activation)
    return dx, dweight, x.new_empty(0) if dbias is None else dbias, dstate


@_from_state_backward.register_fake
def _(dy, dfinal, x, weight, bias, state, *_):
    dx, dweight, dstate = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight, state))
    return dx, dweight, x.new_empty(0) if bias is None else torch.empty_like(bias), dstate


def _setup(ctx, inputs, output):
    x, weight, bias, state, ctx.activation, ctx.backend = inputs
    ctx.save_for_backward(x, weight, bias, state)


def _gradient(ctx, dy, dfinal):
    x, weight, bias, state = ctx.saved_tensors
    dx, dweight, dbias, dstate = torch.ops.matmix.short_conv_from_state_backward(
        dy, dfinal, x, weight, bias, state, ctx.activation, ctx.backend
    )
    return dx, dweight, None if bias is None else dbias, dstate, None, None


_from_state.register_autograd(_gradient, setup_context=_setup)


@register_flop_formula(torch.ops.matmix.short_conv_from_state)
def _(x_shape, weight_shape, *args, **kwargs) -> int:
    batch, seqlen, _ = x_shape
    return 2 * batch * seqlen * weight_shape[0] * weight_shape[1]


@register_flop_formula(torch.ops.matmix.short_conv_from_state_backward)
def _(dy_shape, dfinal_shape, x_shape, weight_shape, *args, **kwargs) -> int:
    batch, seqlen, _ = x_shape
    return 2 * 2 * batch * seqlen * weight_shape[0] * weight_shape[1]
