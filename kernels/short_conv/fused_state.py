"""The causal short convolution that goes on after a state, in Triton, one launch each way.

The kernels of `fused` read the rows before the first token from the state, and write the state that is left, so that x
is not copied.
"""

from __future__ import annotations

from torch import Tensor

from matmix.kernels.short_conv.fused import configurations, convolve, force_configuration, gradients

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
    *others, dstate = gradients(dy, dfinal, x, weight, bias, state, True, activation, None)
    assert dstate is not None
    return *others, dstate
