"""The definition of the layer in float64, with which the fast forms are compared."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.gated_norm.definition import gated_norm_definition
from matmix.kernels.scan_layer.chunked import LayerForm
from matmix.kernels.semiseparable.definition import quasiseparable_definition, semiseparable_definition
from matmix.kernels.short_conv.definition import short_conv_definition


def scan_layer_definition(
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
) -> Tensor:
    """See `scan_layer`; one part after the other."""
    projected = projected.to(torch.float64)
    headdim = norm_weight.shape[0] // nheads
    form = LayerForm(nheads, headdim, ngroups, d_state, directions, shift, *dt_limits)
    z, mixed, raw = form.split(projected)
    causal = directions == 1
    mixed = short_conv_definition(
        mixed, conv_weight, conv_bias, causal=causal, activation="silu", cu_seqlens=cu_seqlens
    )
    v, q, k = form.values_and_vectors(mixed)
    dt = F.softplus(raw.unflatten(-1, (directions, nheads)) + dt_bias.double()).clamp(*dt_limits)
    log_decay = -dt * A_log.double().exp()
    diagonal = D
    if diagonal_weight is not None:
        diagonal = v.flatten(-2) @ diagonal_weight.double().t() + D
    documents = projected.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    state = form.scan_states(initial_states, documents)
    if causal:
        y = semiseparable_definition(
            v, q[0], k[0], log_decay[..., 0, :], input_scale=dt[..., 0, :], diagonal=diagonal, initial_state=state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
    else:
        y = quasiseparable_definition(
            v, q[0], k[0], q[1], k[1], log_decay[..., 0, :], log_decay[..., 1, :],
            input_scale_forward=dt[..., 0, :], input_scale_backward=dt[..., 1, :], diagonal=diagonal, shift=shift,
            initial_state_forward=state, initial_state_backward=state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    y = y.flatten(-2)
    if norm_first:
        return gated_norm_definition(y, norm_weight, z, eps=eps, group_size=group_size)
    gated = (y * F.silu(z)).unflatten(-1, (-1, group_size or y.shape[-1]))
    normed = gated / torch.sqrt(gated.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * norm_weight
