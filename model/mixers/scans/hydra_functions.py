"""Two pieces of the Hydra layer with hand-written gradients, which save memory: for the backward pass they keep only
views of tensors that other operations keep anyway.

PyTorch's own autograd of the same lines keeps four float32 tensors per head and token, and in the backward
pass allocates two more tensors of the inner width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.functions import Function


def free_step_sizes(raw: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Biased raw step sizes (..., 2, nheads) and their softplus, in float32 at least."""
    exact = torch.promote_types(raw.dtype, torch.float32)
    biased = raw.to(exact).unflatten(-1, (2, -1)) + dt_bias.to(exact)
    return biased, F.softplus(biased)


class StepSizes(Function):
    """dt = clamp(softplus(raw + dt_bias)) and the log decay -dt exp(A_log); keeps its inputs only."""

    @staticmethod
    def forward(raw: Tensor, dt_bias: Tensor, A_log: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """raw (..., 2 nheads), the two directions one after the other; dt_bias and A_log (nheads,). Returns dt
        and the log decay, both (..., 2, nheads)."""
        _, dt = free_step_sizes(raw, dt_bias)
        if low > 0 or high < math.inf:
            dt = dt.clamp(low, high)
        return dt, dt * -A_log.to(dt.dtype).exp()

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        *tensors, low, high = inputs
        ctx.save_for_backward(*tensors)
        ctx.limits = low, high

    @staticmethod
    def backward(ctx, ddt: Tensor, ddecay: Tensor) -> tuple[Tensor | None, ...]:
        raw, dt_bias, A_log = ctx.saved_tensors
        low, high = ctx.limits
        biased, free = free_step_sizes(raw, dt_bias)
        A = -A_log.to(free.dtype).exp()
        gradient = torch.addcmul(ddt, ddecay, A) * torch.sigmoid(biased)
        dt = free
        if low > 0 or high < math.inf:
            gradient = gradient.masked_fill((free < low) | (free > high), 0)
            dt = free.clamp(low, high)
        sums = tuple(range(free.dim() - 1))
        dA_log = (ddecay * dt).sum(sums) * A
        dbias = gradient.sum(sums).to(dt_bias.dtype)
        return gradient.flatten(-2).to(raw.dtype), dbias, dA_log.to(A_log.dtype), None, None


def product_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer of x returns, which autocast may lower."""
    device = x.device.type
    if x.is_meta:  # no autocast there
        return x.dtype
    lowered = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if lowered else x.dtype


class ValuesAndVectors(Function):
    """Splits the convolution's output and computes the diagonal v weight^T + D from its first part.

    The gradients of the parts and of the diagonal meet in one buffer, which the product with `weight` adds to
    in place.
    """

    @staticmethod
    def forward(vbc: Tensor, weight: Tensor, D: Tensor, d_group: int) -> tuple[Tensor, ...]:
        """vbc (..., d_inner + 4 d_group); weight (nheads, d_inner); D (nheads,). Returns v (..., d_inner), four
        parts (..., d_group), and the diagonal (..., nheads) in float32 at least."""
        parts = vbc.split([weight.shape[1]] + 4 * [d_group], -1)
        diagonal = F.linear(parts[0], weight)
        exact = torch.promote_types(diagonal.dtype, torch.float32)
        return *parts, diagonal.to(exact) + D.to(exact)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        vbc, weight, D, _ = inputs
        ctx.save_for_backward(vbc, weight)
        ctx.product, ctx.typed = product_dtype(vbc), D.dtype

    @staticmethod
    def backward(ctx, dv: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        vbc, weight = ctx.saved_tensors
        *dvectors, ddiagonal = rest
        wide = weight.shape[1]
        dD = ddiagonal.flatten(0, -2).sum(0).to(ctx.typed)
        factor = ddiagonal.to(ctx.product).flatten(0, -2)
        v = vbc[..., :wide].to(ctx.product).flatten(0, -2)
        dweight = (factor.t() @ v).to(weight.dtype)
        dvbc = torch.cat([dv, *dvectors], -1)
        rows = dvbc.flatten(0, -2)[:, :wide]
        rows.addmm_(factor.to(rows.dtype), weight.to(rows.dtype))
        return dvbc, dweight, dD, None
