"""LION's feature maps, which make queries and keys positive: functions of (..., headdim) in float32 at least."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
