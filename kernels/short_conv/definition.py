"""Short depthwise convolution by its definition, in float64: the specification of the fast form."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def short_conv_definition(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """y_t = sum over taps j of weight[:, j] x_{t + j - left}, zero outside the token's document."""
    x, weight = x.to(torch.float64), weight.to(torch.float64)
    seqlen, width = x.shape[1], weight.shape[1]
    left = width - 1 if causal else width // 2
    bounds = [0, seqlen] if cu_seqlens is None else cu_seqlens.tolist()
    rows = []
    for start, end in itertools.pairwise(bounds):
        for t in range(start, end):
            row = torch.zeros_like(x[:, 0])
            for tap in range(width):
                source = t + tap - left
                if start <= source < end:
                    row = row + weight[:, tap] * x[:, source]
            rows.append(row)
    y = torch.stack(rows, 1)
    if bias is not None:
        y = y + bias.to(torch.float64)
    return y * torch.sigmoid(y) if activation == "silu" else y
