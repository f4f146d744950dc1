"""The definition of the gated RMSNorm in float64, with which the fast forms are compared."""

import torch
from torch import Tensor


def gated_norm_definition(
    x: Tensor, weight: Tensor, gate: Tensor, *, eps: float = 1e-5, group_size: int | None = None
) -> Tensor:
    """rmsnorm(x) * weight * silu(gate), the mean square taken over groups of `group_size` channels."""
    x, weight, gate = (t.to(torch.float64) for t in (x, weight, gate))
    groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    normed = groups / torch.sqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * weight * gate * torch.sigmoid(gate)
