"""Fast Fourier transforms over the tokens, in float32 at least."""

from __future__ import annotations

import math

import torch


def real_transform_flops(length: int) -> float:
    """One transform of real numbers: half of the 5 n log2 n of a complex one."""
    return 2.5 * length * math.log2(max(length, 2))


def fast_length(least: int) -> int:
    """The smallest length from `least` on without a prime factor above 5, for which transforms are fast."""
    length = least
    while True:
        rest = length
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return length
        length += 1


def cosine_transform(v: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """y_i = sum_j cos(2 pi i j / L) v_j along `dim`, the real part of the discrete Fourier transform."""
    exact = v.to(torch.promote_types(v.dtype, torch.float32))
    half = torch.fft.rfft(exact, dim=dim).real
    # Cosines are even: row L - i is row i.
    return torch.cat((half, half.narrow(dim, 1, (v.shape[dim] - 1) // 2).flip(dim)), dim)


def toeplitz_product(upper: torch.Tensor, lower: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """y_i = sum_j m_{i-j} v_j through a circular convolution that is long enough not to wrap.

    Args:
        upper: (B or 1, L, H), m_0, m_-1, ... m_-(L-1); the first is not read.
        lower: (B or 1, L, H), m_0, m_1, ... m_(L-1).
        v: (B, L, H, P).
    """
    exact = torch.promote_types(v.dtype, torch.float32)
    length = v.shape[1]
    if length == 0:
        return v.to(exact)
    size = fast_length(2 * length - 1)
    lower, upper = lower.to(exact), upper.to(exact)
    gap = lower.new_zeros(lower.shape[0], size - 2 * length + 1, lower.shape[2])
    kernel = torch.fft.rfft(torch.cat((lower, gap, upper[:, 1:].flip(1)), 1), dim=1)
    spectrum = torch.fft.rfft(v.to(exact), n=size, dim=1)
    return torch.fft.irfft(kernel.unsqueeze(-1) * spectrum, n=size, dim=1)[:, :length]
