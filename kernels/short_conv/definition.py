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
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """y_t = sum over taps j of weight[:, j] x_{t + j - left}, zero outside the token's document; before a causal one
    `initial_state`, if given."""
    x, weight = x.to(torch.float64), weight.to(torch.float64)
    if initial_state is not None or return_final_state:
        return _from_state(x, weight, bias, activation, initial_state, return_final_state)
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


def _from_state(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor | None, final_state: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Token by token."""
    state = x.new_zeros(x.shape[0], *weight.shape)[..., 1:] if state is None else state
    outputs = []
    for token in x.unbind(1):
        y, state = short_conv_step_definition(token, state, weight, bias, activation=activation)
        outputs.append(y)
    y = torch.stack(outputs, 1)
    return (y, state) if final_state else y


def short_conv_step_definition(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """y = sum over taps j of weight[:, j] w_j of the window w = [state | x], which without w_0 is the new state."""
    window = torch.cat([state.to(torch.float64), x.to(torch.float64).unsqueeze(-1)], -1)
    y = (window * weight.to(torch.float64)).sum(-1)
    if bias is not None:
        y = y + bias.to(torch.float64)
    return y * torch.sigmoid(y) if activation == "silu" else y, window[..., 1:]
