"""The discrete Fourier transform over the tokens, as in FNet (arXiv 2105.03824), in the shared block of the matrix
mixers (arXiv 2407.09941)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from matmix.model.mixers.fourier import cosine_transform, real_transform_flops
from matmix.model.mixers.structured.matrix_mixer import MatrixMixer, SharedBlockConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DFTConfig(SharedBlockConfig):
    """Options of the Fourier mixer."""


class DFT(MatrixMixer):
    """M_ij = L^-1/2 cos(2 pi i j / L), the real part of the transform, L the document's own length; no parameters."""

    Config = DFTConfig
    complexity = "O(L log L)"

    @classmethod
    def mixing_flops(cls, d_inner: int, nheads: int, config: DFTConfig, seqlen: int) -> float:
        return d_inner * real_transform_flops(seqlen) / seqlen

    def entries(self, v: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        length = v.shape[1]
        positions = torch.arange(length, device=v.device)
        # Whole turns are taken off while the numbers are integers and exact.
        turns = torch.outer(positions, positions).remainder(length).double() / length
        cosines = torch.cos(2 * math.pi * turns) * length**-0.5
        dtype = torch.promote_types(v.dtype, torch.float32)
        return cosines.to(dtype).expand(1, self.nheads, length, length)

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> torch.Tensor:
        return cosine_transform(v) * v.shape[1] ** -0.5
