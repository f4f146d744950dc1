"""Toeplitz matrices: long convolutions (TNN, arXiv 2305.04749), in the shared block of the matrix mixers
(arXiv 2407.09941)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from matmix.model.calls import weight_of
from matmix.model.initialization import InitRule
from matmix.model.mixers.convolutions.long import fast_length, real_transform_flops, toeplitz_product
from matmix.model.mixers.structured.matrix_mixer import MatrixMixer, SharedBlockConfig, draw_xavier_normal


@dataclass(frozen=True, kw_only=True, slots=True)
class ToeplitzConfig(SharedBlockConfig):
    """Options of the Toeplitz mixers."""

    offset: Literal["paper", "published"] = "paper"
    """m_(i-j) stands in row i and column j ("paper"), or m_(i-j+1) ("published"), as the papers' code computes it. Each
    m is then one place further right, and the last, which leaves the matrix, stands in its lower left corner."""


class Toeplitz(MatrixMixer):
    """M_ij = 0.5 N^-1/2 m_{i-j}, N = max_seqlen, by fast Fourier transforms in float32.

    With offset "published" it is m_{i-j+1}, and m_-(L-1) in row L-1 and column 0: the code that belongs to arXiv
    2407.09941 pads the values by N - 1 places before a circular convolution of 2 N - 1, and that is one too few.
    """

    Config = ToeplitzConfig
    complexity = "O(L log L)"

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: ToeplitzConfig, seqlen: int) -> float:
        size = fast_length(2 * seqlen - 1)
        # Forth and back for every channel, once for every head's kernel; 6 per product of complex numbers.
        return ((2 * d_inner + nheads) * real_transform_flops(size) + 6 * d_inner * (size // 2 + 1)) / seqlen

    def kernels(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """m_0, m_-1, ... and m_0, m_1, ..., (B or 1, L, H) each, of which the first m_0 counts for nothing."""
        raise NotImplementedError

    def diagonals(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The main diagonal of M and those above it, the main one and those below it, (B or 1, L, H) each, without the
        scale; the first of the former is not read."""
        upper, lower = self.kernels(inputs)
        if self.config.offset == "paper":
            return upper, lower
        m = torch.cat((upper[:, 1:].flip(1), lower), 1).roll(-1, 1)
        return m[:, : lower.shape[1]].flip(1), m[:, lower.shape[1] - 1 :]

    def scale(self) -> float:
        """Returns the factor of all entries."""
        return 0.5 * self.max_seqlen**-0.5

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        upper, lower = self.diagonals(inputs)
        positions = torch.arange(v.shape[1], device=v.device)
        offset = positions.unsqueeze(1) - positions
        below = (offset >= 0).unsqueeze(-1)
        m = torch.where(below, lower[:, offset.clamp(min=0)], upper[:, (-offset).clamp(min=0)])
        return m.permute(0, 3, 1, 2) * self.scale()

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        return toeplitz_product(*self.diagonals(inputs), v) * self.scale()


class ToeplitzDI(Toeplitz):
    """The m_t are parameters: `conv_params` holds m_-(N-1) ... m_(N-1)."""

    fixed_length = True

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        return {"conv_params": ((self.nheads, 2 * self.max_seqlen - 1), draw_xavier_normal)}

    def kernels(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        m, zero = weight_of(self.matrix_mixer, "conv_params").t().unsqueeze(0), self.max_seqlen - 1
        return m[:, : zero + 1].flip(1), m[:, zero:]


class ToeplitzDD(Toeplitz):
    """m_t = q_t for t >= 0 and k_-t for t < 0, a query and a key of one channel for every token and head."""

    data_dependent = sequence_aligned = True

    @classmethod
    def input_widths(cls, nheads: int, config: ToeplitzConfig) -> tuple[int, ...]:
        return (nheads, nheads)

    @classmethod
    def halo(cls, config: ToeplitzConfig) -> int:
        return super().halo(config) + (config.offset == "published")

    def kernels(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k = inputs
        return k, q
