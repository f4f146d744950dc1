"""The masks L of structured masked attention (arXiv 2405.21060, section 4), entry by entry, and fast products with
those that are no scans.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from matmix.kernels.checks import transformed
from matmix.model.mixers.shared import gate_sums

STATE_BLOCK = 4
"""State channels that a product with L takes at a time: it works on `STATE_BLOCK` times as much as there are values."""


def decay_mask(log_gate: Tensor | None, length: int, like: Tensor) -> Tensor:
    """L[i, j] = product of the gates of j + 1 .. i for i >= j, else 0: (B or 1, H or 1, L, L), in float32 at least.

    Args: log_gate (B, L, H), (H,) or None for gates of 1: the lower triangle of ones.
    """
    lower = like.new_ones(length, length, dtype=torch.promote_types(like.dtype, torch.float32)).tril()
    return lower[None, None] if log_gate is None else gate_sums(log_gate, length).exp() * lower


def toeplitz_mask(alpha: Tensor, length: int) -> Tensor:
    """L[i, j] = alpha_{i - j}: alpha (H, 2 N - 1), offset 0 in the middle -> (1, H, L, L) for L <= N."""
    position = torch.arange(length, device=alpha.device)
    return alpha[:, (position[:, None] - position) + alpha.shape[-1] // 2].unsqueeze(0)


def fourier_mask(length: int, like: Tensor) -> Tensor:
    """L[i, j] = cos(2 pi i j / L), (1, 1, L, L), in float32 at least."""
    position = torch.arange(length, device=like.device)
    # Whole turns are taken off while the numbers are whole: i j is soon beyond what float32 can count.
    turns = torch.outer(position, position).remainder(length)
    turns = turns.to(torch.promote_types(like.dtype, torch.float32)) / length
    return (2 * math.pi * turns).cos()[None, None]


def toeplitz_spectrum(alpha: Tensor, length: int) -> Tensor:
    """The spectrum that `toeplitz_mask_product` multiplies with: the transform of the circulant matrix that L is a
    corner of."""
    points = transform_length(length)
    middle = alpha.shape[-1] // 2
    alpha = alpha.to(torch.promote_types(alpha.dtype, torch.float32))
    gap = alpha.new_zeros(alpha.shape[0], points - (2 * length - 1))
    circle = torch.cat([alpha[:, middle : middle + length], gap, alpha[:, middle - length + 1 : middle]], -1)
    return torch.fft.rfft(circle)


def toeplitz_mask_product(x: Tensor, spectrum: Tensor) -> Tensor:
    """L x for x (B, H, ..., L) and a spectrum (H, points / 2 + 1)."""
    points, length = 2 * (spectrum.shape[-1] - 1), x.shape[-1]
    spectrum = spectrum.view(1, spectrum.shape[0], *[1] * (x.dim() - 3), -1)
    return torch.fft.irfft(torch.fft.rfft(x, points) * spectrum, points)[..., :length]


def transform_length(length: int) -> int:
    """The least power of two in which a Toeplitz product of this length does not wrap round."""
    return max(2, 1 << (2 * length - 2).bit_length())


def masked_product(q: Tensor, k: Tensor, v: Tensor, product: Callable[..., Tensor], *parameters: Tensor) -> Tensor:
    """(L * Q K^T) V in the linear order: y_i = sum over n of q_in (L (k_n v_p))_i.

    k and v are contracted first, to N P channels per token, of which L takes a few at a time, and which are computed
    again in the backward pass: memory is that of the values.

    Args:
        q, k: (B, L, H, N). v: (B, L, H, P).
        product: L x for x (B, H, ..., L), with `parameters` as further arguments.
    Returns: (B, L, H, P) in float32 at least.
    """
    exact = torch.promote_types(v.dtype, torch.float32)
    q, k, v = (part.to(exact).permute(0, 2, 3, 1) for part in (q, k, v))

    def block(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return (q.unsqueeze(3) * product(k.unsqueeze(3) * v.unsqueeze(2), *parameters)).sum(2)

    y = torch.zeros_like(v)
    for q_part, k_part in zip(q.split(STATE_BLOCK, 2), k.split(STATE_BLOCK, 2), strict=True):
        arguments = (q_part, k_part, v, *parameters)
        if torch.is_grad_enabled() and not transformed():
            y = y + checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            y = y + block(*arguments)
    return y.permute(0, 3, 1, 2)
