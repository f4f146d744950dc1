"""Gated RMSNorm in PyTorch, with a hand-written backward pass that stores the inputs only."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from matmix.kernels.functions import Form, Operation, Output, cache_blocks, in_pytorch, outside_autocast, working_dtype


class NormInputs(NamedTuple):
    """The arguments of `gated_norm`."""

    x: Tensor
    weight: Tensor
    gate: Tensor
    eps: float = 1e-5
    group_size: int | None = None


def norm_rows(x: Tensor, group: int, eps: float) -> tuple[Tensor, Tensor]:
    """x (rows, d) over its root mean square in groups, (rows, groups, group), and the reciprocal root."""
    x = x.unflatten(-1, (-1, group))
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return x * scale, scale


@outside_autocast
def norm_forward(given: NormInputs) -> Tensor:
    x, weight, gate, eps, group_size = given
    dtype, group = working_dtype(x), group_size or x.shape[-1]
    rows, gates = x.flatten(0, -2), gate.flatten(0, -2)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    weight = weight.to(dtype)
    for at in cache_blocks(*rows.shape, x.device):
        normed, _ = norm_rows(rows[at].to(dtype), group, eps)
        out[at] = normed.flatten(-2).mul_(weight).mul_(torch.nn.functional.silu(gates[at].to(dtype)))
    return out.view(x.shape)


@outside_autocast
def norm_backward(given: NormInputs, _: Output, cotangents: Output) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, gate, eps, group_size = given
    dtype, group = working_dtype(x), group_size or x.shape[-1]
    rows, gates, grads = x.flatten(0, -2), gate.flatten(0, -2), cotangents.y.flatten(0, -2)
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


GATED_NORM = Operation("gated_norm", NormInputs, Output, Form(norm_forward, norm_backward))


def gated_norm_torch(*tensors: Tensor, **options: Any) -> Tensor:
    """`gated_norm` in PyTorch, without argument checks; see there."""
    return in_pytorch(GATED_NORM)(NormInputs(*tensors, **options)).y
