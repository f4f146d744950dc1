"""The gated RMSNorm as an op: checks, backend choice, registration with PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from matmix.kernels.backend import check_backend, implementation
from matmix.kernels.checks import check_floating, check_shape
from matmix.kernels.gated_norm.chunked import norm_backward, norm_forward


def gated_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """rmsnorm(x) * weight * silu(gate), normalised first, then gated.

    Args:
        x: (..., d).
        weight: (d,).
        gate: shaped like x.
        eps: added to the mean square.
        group_size: channels that share a root mean square, a divisor of d; None for all of them.
        backend: "auto", "torch" or "triton".

    Returns:
        Shaped and typed like x; computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
    op = "gated_norm"
    check_floating(op, x=x, weight=weight, gate=gate)
    if x.dim() < 2 or 0 in x.shape:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}; expected (..., d), none of them 0")
    check_shape(op, "weight", weight, x.shape[-1:])
    check_shape(op, "gate", gate, tuple(x.shape))
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"{op}: group_size is {group_size}; use a divisor of the width {x.shape[-1]}")
    check_backend(op, backend, x)
    return torch.ops.matmix.gated_norm(x, weight, gate, eps, group_size, backend)


@torch.library.custom_op("matmix::gated_norm", mutates_args=())
def _gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, group_size: int | None, backend: str) -> Tensor:
    run = implementation("gated_norm", "forward", norm_forward, backend, x)
    return run(x, weight, gate, eps, group_size)


@_gated_norm.register_fake
def _(x, *args):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("matmix::gated_norm_backward", mutates_args=())
def _gated_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor, eps: float, group_size: int | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    run = implementation("gated_norm", "backward", norm_backward, backend, x)
    return run(dy, x, weight, gate, eps, group_size)


@_gated_norm_backward.register_fake
def _(dy, x, weight, gate, eps, group_size, backend):
    dx, dgate = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, gate))
    return dx, torch.empty_like(weight), dgate


def _setup(ctx, inputs, output):
    x, weight, gate, ctx.eps, ctx.group_size, ctx.backend = inputs
    ctx.save_for_backward(x, weight, gate)


def _gradient(ctx, dy):
    grads = torch.ops.matmix.gated_norm_backward(dy, *ctx.saved_tensors, ctx.eps, ctx.group_size, ctx.backend)
    return *grads, None, None, None


_gated_norm.register_autograd(_gradient, setup_context=_setup)


# Operations per element. Convention: one for each addition, multiplication, division and exponential; what is done
# once per group (the root) is left out, and so is what only one backend does (reading twice, padding).
_FORWARD_FLOPS = 2 + 2 + 3 + 2
"""Squares and their sum; scale and weight; the gate's sigmoid (exp, add, divide); gate times that, product."""
_BACKWARD_FLOPS = 3 + 3 + 3 + 2 + 2 + 3 + 7
"""Normed x again; sigmoid; dy gate sigmoid weight; weight's sums; sums along the group; dx; dgate."""


@register_flop_formula(torch.ops.matmix.gated_norm)
def _(x_shape, *args, **kwargs) -> int:
    return _FORWARD_FLOPS * x_shape.numel()


@register_flop_formula(torch.ops.matmix.gated_norm_backward)
def _(dy_shape, x_shape, *args, **kwargs) -> int:
    return _BACKWARD_FLOPS * x_shape.numel()
