"""Short depthwise convolution by its definition, in float64: the specification of the fast form."""

import itertools
from typing import Any

import torch
from torch import Tensor

from matmix.kernels.short_conv.chunked import ConvStepInputs
from matmix.kernels.short_conv.parts import ConvInputs


def short_conv_definition(
    *tensors: Tensor | None, initial_state: Tensor | None = None, return_final_state: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """y_t = sum over taps j of weight[:, j] x_{t + j - left}, zero outside the token's document; before a causal one
    `initial_state`, if given, from which it goes token by token."""
    x, weight, bias, causal, activation, cu_seqlens, _ = ConvInputs(*tensors, **options)
    x, weight, rows = x.to(torch.float64), weight.to(torch.float64), []
    if initial_state is not None or return_final_state:
        state = x.new_zeros(x.shape[0], *weight.shape)[..., 1:] if initial_state is None else initial_state
        for token in x.unbind(1):
            y, state = short_conv_step_definition(token, state, weight, bias, activation)
            rows.append(y)
        return (torch.stack(rows, 1), state) if return_final_state else torch.stack(rows, 1)
    seqlen, width = x.shape[1], weight.shape[1]
    left = width - 1 if causal else width // 2
    bounds = [0, seqlen] if cu_seqlens is None else cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        for t in range(start, end):
            row = torch.zeros_like(x[:, 0])
            for tap in range(width):
                source = t + tap - left
                if start <= source < end:
                    row = row + weight[:, tap] * x[:, source]
            rows.append(row)
    return _activated(torch.stack(rows, 1), bias, activation)


def short_conv_step_definition(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """y = sum over taps j of weight[:, j] w_j of the window w = [state | x], which without w_0 is the new state."""
    x, state, weight, bias, activation = ConvStepInputs(*tensors, **options)
    window = torch.cat([state.to(torch.float64), x.to(torch.float64).unsqueeze(-1)], -1)
    return _activated((window * weight.to(torch.float64)).sum(-1), bias, activation), window[..., 1:]


def _activated(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    y = y if bias is None else y + bias.to(torch.float64)
    return y * torch.sigmoid(y) if activation == "silu" else y
