"""The definition of the layer in float64, with which the fast forms are compared."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.gated_norm.definition import gated_norm_definition
from matmix.kernels.scan_layer.chunked import LayerInputs
from matmix.kernels.semiseparable.definition import quasiseparable_definition, semiseparable_definition
from matmix.kernels.short_conv.definition import short_conv_definition


def scan_layer_definition(*tensors: Tensor | None, **options: Any) -> Tensor:
    """See `scan_layer`; one part after the other."""
    given = LayerInputs.of(*tensors, **options)
    projected, form, causal = given.projected.to(torch.float64), given.form, given.directions == 1
    packing = {"cu_seqlens": given.cu_seqlens}
    z, mixed, raw = form.split(projected)
    mixed = short_conv_definition(
        mixed, given.conv_weight, given.conv_bias, causal=causal, activation="silu", **packing
    )
    v, q, k = form.values_and_vectors(mixed)
    dt = F.softplus(raw.unflatten(-1, (given.directions, given.nheads)) + given.dt_bias.double())
    dt = dt.clamp(form.low, form.high)
    log_decay = -dt * given.A_log.double().exp()
    diagonal = given.D
    if given.diagonal_weight is not None:
        diagonal = v.flatten(-2) @ given.diagonal_weight.double().t() + given.D
    documents = projected.shape[0] if given.cu_seqlens is None else given.cu_seqlens.numel() - 1
    state = form.scan_states(given.initial_states, documents)
    if causal:
        y = semiseparable_definition(
            v, q[0], k[0], log_decay[..., 0, :], input_scale=dt[..., 0, :], diagonal=diagonal, initial_state=state,
            **packing,
        )  # fmt: skip
    else:
        y = quasiseparable_definition(
            v, q[0], k[0], q[1], k[1], log_decay[..., 0, :], log_decay[..., 1, :],
            input_scale_forward=dt[..., 0, :], input_scale_backward=dt[..., 1, :], diagonal=diagonal,
            shift=given.shift, initial_state_forward=state, initial_state_backward=state, **packing,
        )  # fmt: skip
    weight, eps, group_size = given.norm_weight, given.eps, given.group_size
    y = y.flatten(-2)
    if given.norm_first:
        return gated_norm_definition(y, weight, z, eps=eps, group_size=group_size)
    gated = (y * F.silu(z)).unflatten(-1, (-1, group_size or y.shape[-1]))
    normed = gated / torch.sqrt(gated.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * weight
