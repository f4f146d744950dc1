"""Fourier transforms over the tokens, and convolutions as long as the sequence: each channel has its own kernel.
All of it is computed in float32 at least.

Kernels are `after` (d, L), whose tap l weighs the token l before, and for both directions `before` (d, L - 1), whose
tap l weighs the token l + 1 ahead.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.kernels.functions import working
from matmix.model.positions import by_documents


def real_transform_flops(length: int) -> float:
    """One transform of real numbers: half of the 5 n log2 n of a complex one."""
    return 2.5 * length * math.log2(max(length, 2))


def fast_length(least: int) -> int:
    """The smallest length from `least` on without a prime factor above 5, for which transforms are fast."""

    def rest(length: int) -> int:
        for factor in (2, 3, 5):
            while length % factor == 0:
                length //= factor
        return length

    return next(length for length in itertools.count(least) if rest(length) == 1)


def fourier_angles(length: int, device: torch.device) -> Tensor:
    """2 pi i j / length (length, length) in float64, less whole turns."""
    positions = torch.arange(length, device=device)
    # Whole turns are taken off while the numbers are integers and exact.
    return torch.outer(positions, positions).remainder(length).double() * (2 * math.pi / length)


def cosine_transform(v: Tensor, dim: int = 1) -> Tensor:
    """y_i = sum_j cos(2 pi i j / L) v_j along `dim`, the real part of the discrete Fourier transform."""
    half = torch.fft.rfft(working(v), dim=dim).real
    # Cosines are even: row L - i is row i.
    return torch.cat((half, half.narrow(dim, 1, (v.shape[dim] - 1) // 2).flip(dim)), dim)


def toeplitz_product(upper: Tensor, lower: Tensor, v: Tensor) -> Tensor:
    """y_i = sum_j m_{i-j} v_j for v (B, L, H, P), through a circular convolution that is long enough not to wrap.
    upper (B or 1, L, H): m_0, m_-1, ... m_-(L-1), of which the first is not read; lower (B or 1, L, H): m_0, m_1, ...
    m_(L-1)."""
    v, length = working(v), v.shape[1]
    if length == 0:
        return v
    size = fast_length(2 * length - 1)
    lower, upper = lower.to(v.dtype), upper.to(v.dtype)
    gap = lower.new_zeros(lower.shape[0], size - 2 * length + 1, lower.shape[2])
    kernel = torch.fft.rfft(torch.cat((lower, gap, upper[:, 1:].flip(1)), 1), dim=1)
    spectrum = torch.fft.rfft(v, n=size, dim=1)
    return torch.fft.irfft(kernel.unsqueeze(-1) * spectrum, n=size, dim=1)[:, :length]


def long_convolution(x: Tensor, after: Tensor, before: Tensor | None = None) -> Tensor:
    """The convolution of x (B, L, d) by Fourier transforms, (B, L, d) in float32 at least.

    Outputs of the causal form have traces of rounding of the tokens to come, about 1e-7 in float32.
    """
    upper = torch.zeros_like(after) if before is None else F.pad(before, (1, 0))
    upper, lower = (part.T.unsqueeze(0) for part in (upper, after))
    return toeplitz_product(upper, lower, x.unsqueeze(-1)).squeeze(-1)


def packed_convolution(x: Tensor, cu_seqlens: Tensor | None, kernels: Callable[[int], Sequence[Tensor]]) -> Tensor:
    """`long_convolution` of x (B, L, d), of packed documents (B = 1) of each by itself, in float32 at least.

    `kernels` makes `after`, or `after` and `before`, for a length. It is called once, for the longest document:
    shorter ones take the beginning. Documents of similar length are filled up with zeros and transformed together.
    Reads cu_seqlens on the host.
    """
    if cu_seqlens is None:
        return long_convolution(x, *kernels(x.shape[1]))
    longest = int(cu_seqlens.diff().max())
    if not longest:
        return working(x)
    after, *before = kernels(longest)

    def convolved(rows: Tensor, _: Tensor | None) -> Tensor:
        length = rows.shape[1]
        return long_convolution(rows, after[:, :length], *(other[:, : length - 1] for other in before))

    return by_documents(convolved, cu_seqlens, half_octave, x[0]).unsqueeze(0)


def half_octave(length: int) -> int:
    """The least bound from `length` on, of two per octave: rows of one bound are filled up by half at most."""
    bound = 1 << (length - 1).bit_length()
    between = bound * 3 // 4
    return between if length <= between else bound


def long_convolution_flops(seqlen: int) -> float:
    """Operations per token and channel: transforms of x, of the kernel and back; 6 per complex product."""
    size = fast_length(2 * seqlen - 1)
    return (3 * real_transform_flops(size) + 6 * (size // 2 + 1)) / seqlen


def convolution_matrix(after: Tensor, before: Tensor | None = None) -> Tensor:
    """T (d, L, L) with T[t, s] = after[t - s] for s <= t and before[s - t - 1] above (zero if None)."""
    if before is None:
        before = torch.zeros_like(after[:, 1:])
    positions = torch.arange(after.shape[1], device=after.device)
    lags = positions.unsqueeze(1) - positions
    return torch.cat([before.flip(1), after], 1)[:, lags + before.shape[1]]
