"""The layer in PyTorch, on any device: one part after the other, each with its own backward pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.gated_norm.chunked import gated_norm_torch
from matmix.kernels.scan_layer.form import LayerForm, exact_type
from matmix.kernels.semiseparable.chunked import quasiseparable_chunked, semiseparable_chunked
from matmix.kernels.short_conv.chunked import short_conv_torch


def scan_layer_torch(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    norm_weight: Tensor,
    *,
    nheads: int,
    ngroups: int,
    d_state: int,
    directions: int = 2,
    shift: bool = True,
    D: Tensor | None = None,
    diagonal_weight: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_first: bool = True,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    recompute: bool = False,
) -> Tensor:
    """`scan_layer` in PyTorch, without argument checks; see there. `recompute` changes nothing here."""
    headdim = norm_weight.shape[0] // nheads
    form = LayerForm(nheads, headdim, ngroups, d_state, directions, shift, *dt_limits)
    z, mixed, raw = form.split(projected)
    causal = directions == 1
    mixed = short_conv_torch(mixed, conv_weight, conv_bias, causal=causal, activation="silu", cu_seqlens=cu_seqlens)
    v, q, k = form.values_and_vectors(mixed)
    exact = exact_type(raw)
    dt = F.softplus(raw.to(exact).unflatten(-1, (directions, nheads)) + dt_bias.to(exact)).clamp(*dt_limits)
    log_decay = dt * -A_log.to(exact).exp()
    diagonal = D
    if diagonal_weight is not None:
        assert D is not None
        diagonal = F.linear(v.flatten(-2), diagonal_weight.to(v.dtype)).to(exact) + D.to(exact)
    documents = projected.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    sides = form.sides(q, k, dt, log_decay, form.scan_states(initial_states, documents))
    first, second = sides[0], sides[-1]
    if causal:
        y = semiseparable_chunked(
            v, first.q, first.k, first.log_decay, input_scale=first.input_scale, diagonal=diagonal,
            initial_state=first.initial_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
        )  # fmt: skip
    else:
        y = quasiseparable_chunked(
            v, first.q, first.k, second.q, second.k, first.log_decay, second.log_decay,
            input_scale_forward=first.input_scale, input_scale_backward=second.input_scale, diagonal=diagonal,
            shift=shift, initial_state_forward=first.initial_state, initial_state_backward=second.initial_state,
            cu_seqlens=cu_seqlens, chunk_size=chunk_size,
        )  # fmt: skip
    y = y.flatten(-2)
    if norm_first:
        return gated_norm_torch(y, norm_weight, z, eps=eps, group_size=group_size)
    gated = (y.to(exact) * F.silu(z.to(exact))).unflatten(-1, (-1, group_size or y.shape[-1]))
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return ((gated * scale).flatten(-2) * norm_weight).to(y.dtype)
