"""Gates from (0, 1] between neighbouring tokens: their logits and the sums of their logarithms, exactly."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.precision import outside_autocast


@outside_autocast
def exact_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b in float32 at least, also under autocast."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(exact), weight.to(exact), bias.to(exact))


def gate_sums(log_gate: Tensor, length: int) -> Tensor:
    """Sums over k = j + 1 .. i of log_gate[k] for i > j, else 0: (B, L, H) or (H,) -> (B or 1, H, L, L).

    Summed, not taken as a difference of two cumulative sums: those cancel once a few gates are nearly closed.
    """
    if log_gate.dim() == 1:
        position = torch.arange(length, device=log_gate.device)
        distance = (position[:, None] - position).clamp(min=0)
        return (log_gate[:, None, None] * distance).unsqueeze(0)
    later = torch.ones(length, length, dtype=torch.bool, device=log_gate.device).tril(-1)
    return torch.where(later, log_gate.transpose(1, 2).unsqueeze(-1), 0).cumsum(-2)
