"""Convolutions as long as the sequence, each channel with its own kernel, and the matrices that define them.

Kernels are `after` (d, L), whose tap l weighs the token l before, and for both directions `before` (d, L - 1), whose
tap l weighs the token l + 1 ahead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.model.mixers.fourier import fast_length, real_transform_flops, toeplitz_product


def long_convolution(x: Tensor, after: Tensor, before: Tensor | None = None) -> Tensor:
    """The convolution of x (B, L, d) by Fourier transforms, (B, L, d) in float32 at least.

    Outputs of the causal form have traces of rounding of the tokens to come, about 1e-7 in float32.
    """
    upper = torch.zeros_like(after) if before is None else F.pad(before, (1, 0))
    upper, lower = (part.T.unsqueeze(0) for part in (upper, after))
    return toeplitz_product(upper, lower, x.unsqueeze(-1)).squeeze(-1)


def long_convolution_flops(seqlen: int) -> float:
    """Operations per token and channel: transforms of x, of the kernel and back, and 6 per product of complex
    numbers."""
    size = fast_length(2 * seqlen - 1)
    return (3 * real_transform_flops(size) + 6 * (size // 2 + 1)) / seqlen


def convolution_matrix(after: Tensor, before: Tensor | None = None) -> Tensor:
    """T (d, L, L) with T[t, s] = after[t - s] for s <= t and before[s - t - 1] above (zero if None)."""
    if before is None:
        before = torch.zeros_like(after[:, 1:])
    positions = torch.arange(after.shape[1], device=after.device)
    lags = positions.unsqueeze(1) - positions
    return torch.cat([before.flip(1), after], 1)[:, lags + before.shape[1]]
