"""Gated RMSNorm in PyTorch, with a hand-written backward pass that stores the inputs only."""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.functions import Function, cache_blocks, gradient_of, outside_autocast


def norm_rows(x: Tensor, group: int, eps: float) -> tuple[Tensor, Tensor]:
    """x (rows, d) over its root mean square in groups, (rows, groups, group), and the reciprocal root."""
    x = x.unflatten(-1, (-1, group))
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return x * scale, scale


@outside_autocast
def norm_forward(x: Tensor, weight: Tensor, gate: Tensor, eps: float, group_size: int | None) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    group = group_size or x.shape[-1]
    rows, gates = x.flatten(0, -2), gate.flatten(0, -2)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    weight = weight.to(dtype)
    for at in cache_blocks(*rows.shape, x.device):
        normed, _ = norm_rows(rows[at].to(dtype), group, eps)
        out[at] = normed.flatten(-2).mul_(weight).mul_(torch.nn.functional.silu(gates[at].to(dtype)))
    return out.view(x.shape)


@outside_autocast
def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor, eps: float, group_size: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and gate."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    group = group_size or x.shape[-1]
    rows, gates, grads = x.flatten(0, -2), gate.flatten(0, -2), dy.flatten(0, -2)
    dx = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dgate = torch.empty_like(gates, memory_format=torch.contiguous_format)
    dweight = torch.zeros(weight.shape, dtype=dtype, device=x.device)
    wide = weight.to(dtype)
    for at in cache_blocks(*rows.shape, x.device):
        normed, scale = norm_rows(rows[at].to(dtype), group, eps)
        flat = normed.flatten(-2)
        g, grad = gates[at].to(dtype), grads[at].to(dtype)
        sigmoid = torch.sigmoid(g)
        gated = grad * g * sigmoid
        dgate[at] = grad * flat * wide * sigmoid * (1 + g * (1 - sigmoid))
        dweight += (gated * flat).sum(0)
        dnormed = (gated * wide).unflatten(-1, (-1, group))
        along = (dnormed * normed).mean(-1, keepdim=True)
        dx[at] = ((dnormed - normed * along) * scale).flatten(-2)
    return dx.view(x.shape), dweight.to(weight.dtype), dgate.view(gate.shape)


class GatedNormFunction(Function):
    @staticmethod
    def forward(x, weight, gate, eps, group_size):
        return norm_forward(x, weight, gate, eps, group_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, eps, group_size = inputs
        ctx.save_for_backward(*tensors)
        ctx.options = eps, group_size

    @staticmethod
    def backward(ctx, dy):
        return *gradient_of(norm_backward, dy, *ctx.saved_tensors, *ctx.options), None, None


def gated_norm_torch(
    x: Tensor, weight: Tensor, gate: Tensor, *, eps: float = 1e-5, group_size: int | None = None
) -> Tensor:
    """`gated_norm` in PyTorch, without argument checks; see there."""
    return GatedNormFunction.apply(x, weight, gate, eps, group_size)
