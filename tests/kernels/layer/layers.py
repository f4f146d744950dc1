"""Inputs of the layer as one operation."""

from __future__ import annotations

import torch
from torch import Tensor

PARAMETERS = (
    "conv_weight", "conv_bias", "dt_bias", "A_log", "norm_weight", "D", "diagonal_weight", "initial_states"
)  # fmt: skip


def layer_inputs(
    seqlen: int,
    *,
    batch: int,
    directions: int = 2,
    heads: int = 2,
    headdim: int = 12,
    groups: int = 1,
    d_state: int = 6,
    taps: int = 5,
    conv_bias: bool = True,
    own_steps: bool = False,
    diagonal: str = "projected",
    states: bool = False,
) -> dict[str, Tensor | None]:
    """The tensors that `scan_layer` takes, by name. own_steps: each direction has its own dt_bias and A_log."""
    inner, channels = heads * headdim, heads * headdim + 2 * directions * groups * d_state
    steps = (2, heads) if own_steps else (heads,)
    return {
        "projected": torch.randn(batch, seqlen, inner + channels + directions * heads),
        "conv_weight": 0.6 * torch.randn(channels, taps),
        "conv_bias": 0.3 * torch.randn(channels) if conv_bias else None,
        "dt_bias": torch.randn(steps) - 0.5,
        "A_log": 0.5 * torch.randn(steps),
        "norm_weight": 1 + 0.3 * torch.randn(inner),
        "D": torch.randn(heads) if diagonal != "none" else None,
        "diagonal_weight": 0.3 * torch.randn(heads, inner) if diagonal == "projected" else None,
        "initial_states": torch.randn(heads, headdim, d_state) if states else None,
    }
