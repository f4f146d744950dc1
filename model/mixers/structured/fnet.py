"""The mixing layer of FNet (arXiv 2105.03824): the discrete Fourier transform over tokens and over channels."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from matmix.kernels.functions import working
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.convolutions.long import fourier_angles, real_transform_flops
from matmix.model.mixers.whole_documents import documents_over_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class FNetConfig:
    """Options of FNet."""

    scale: Literal["unitary", "none"] = "unitary"
    """(L d_model)^-1/2, with which outputs are as large as inputs, or none, as published."""


class FNet(Mixer):
    """Y = Re(F_L X F_d) of a document of L tokens, F the discrete Fourier transforms; no parameters.

    With F = C - i S of cosines and sines it is C (X C_d) - S (X S_d): two heads, whose matrices are C and -S. With
    model.mlp_ratio above 0 the block is that of FNet.
    """

    Config = FNetConfig
    bidirectional_form = True
    takes_context = True
    sequence_aligned = False
    data_dependent = False
    complexity = "O(L log L)"

    def __init__(self, d_model: int, config: FNetConfig, **options):
        super().__init__(d_model, config, **options)
        self.init_rules = {}  # nothing is projected

    @classmethod
    def mixing_flops(cls, d_model: int, config: FNetConfig, seqlen: int, causal: bool) -> float:
        half = d_model // 2 + 1
        return real_transform_flops(d_model) + 2 * half * real_transform_flops(seqlen) / seqlen

    def scaled(self, y: Tensor, length: int) -> Tensor:
        """y times the factor of a document of `length` tokens."""
        return y if self.config.scale == "none" else y * (length * self.d_model) ** -0.5

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        half = torch.view_as_real(torch.fft.rfft(working(x)))
        y, mirrored = documents_over_heads(self.over_tokens, self.context, cu_seqlens, half).unbind(-1)
        # Of real numbers channel d - c of token t is channel c of token -t.
        return torch.cat((y, mirrored[..., 1 : (self.d_model + 1) // 2].flip(-1)), -1).to(x.dtype)

    def over_tokens(self, half: Tensor) -> Tensor:
        """Real and imaginary parts (B, L, channels, 2) -> the real parts of their transform at t and at -t."""
        y = torch.fft.fft(torch.view_as_complex(half.contiguous()), dim=1).real
        return self.scaled(torch.stack((y, y.flip(1).roll(1, 1)), -1), half.shape[1])

    def matrix(self, x: Tensor) -> Tensor:
        angles = fourier_angles(x.shape[1], x.device)
        return torch.stack((angles.cos(), -angles.sin())).to(working(x).dtype).unsqueeze(0)

    def values(self, x: Tensor) -> Tensor:
        angles, x = fourier_angles(self.d_model, x.device), working(x)
        return torch.stack((x @ angles.cos().to(x.dtype), x @ angles.sin().to(x.dtype)), 2)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.scaled(mixed.sum(2), x.shape[1]).to(x.dtype)
