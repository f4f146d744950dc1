"""The causal short convolution that goes on after a state, in Triton, one launch each way.

The kernels of `fused` read the rows before the first token from the state, and write the state that is left, so that x
is not copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.short_conv.fused import (
    configurations,
    convolve,
    force_configuration,
    gradients,
    of_parameters,
)

__all__ = ["backward", "configurations", "force_configuration", "forward"]


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    """See `conv_from_state_forward` of the PyTorch form."""
    y, final = convolve(x, weight, bias, state, True, activation, None)
    assert final is not None
    return y, final


def backward(
    dy: Tensor, dfinal: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """See `conv_from_state_backward` of the PyTorch form."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    sums, dstate = gradients(dy, x, weight, bias, True, activation, None, dx, state=state, dfinal=dfinal)
    assert dstate is not None
    return dx, *of_parameters(sums, weight, bias), dstate
