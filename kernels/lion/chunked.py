"""LION's feature maps, and its mixing in PyTorch on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.documents import shift_right
from matmix.kernels.semiseparable.chunked import quasiseparable_chunked


def shifted_elu(x: Tensor) -> Tensor:
    """elu(x) + 1, as max(x, 0) + exp(min(x, 0)): small values keep their digits."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.relu() + x.clamp(max=0).exp()


def shifted_silu(x: Tensor) -> Tensor:
    """silu(x) + 1/2, which is above 0.22."""
    return F.silu(x.to(torch.promote_types(x.dtype, torch.float32))) + 0.5


def normalized_silu(x: Tensor) -> Tensor:
    """`shifted_silu` divided by its length."""
    x = shifted_silu(x)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


FEATURE_MAPS = {"elu": shifted_elu, "silu": shifted_silu, "silu_norm": normalized_silu}
"""`feature_map` in the configuration -> function, computed in float32 at least."""


def lion_mixer_torch(
    qkv: Tensor,
    gates: Tensor | None,
    *,
    nheads: int,
    feature_map: str = "silu_norm",
    gate_offset: int = 1,
    forward_gate_offset: int = 0,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    return_row_sums: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`lion_mixer` in PyTorch, without argument checks; see there."""
    q, k, v = qkv.unflatten(-1, (3, nheads, -1)).unbind(-3)
    features = FEATURE_MAPS[feature_map]
    q, k = (features(q) * q.shape[-1] ** -0.5).to(v.dtype), features(k).to(v.dtype)
    forward = backward = None
    if gates is not None:
        forward = backward = F.logsigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))
        if forward_gate_offset and gates.dim() == 3:
            forward = shift_right(forward, cu_seqlens)
    options = {"shift": False, "self_term": "mean", "gate_offset": gate_offset, "cu_seqlens": cu_seqlens}
    if not return_row_sums:
        y = quasiseparable_chunked(v, q, k, q, k, forward, backward, normalize="row_sum", eps=eps, **options)
        return y.flatten(-2)
    # A row's sum is what it makes of ones.
    exact = torch.promote_types(v.dtype, torch.float32)
    q, k, v = q.to(exact), k.to(exact), F.pad(v.to(exact), (0, 1), value=1.0)
    sums = quasiseparable_chunked(v, q, k, q, k, forward, backward, **options)
    y = sums[..., :-1] / (sums[..., -1:] + eps)
    return y.to(qkv.dtype).flatten(-2), sums[..., -1]
