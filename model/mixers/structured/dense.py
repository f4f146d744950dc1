"""A dense matrix of parameters per head, as in MLP-Mixer (arXiv 2105.01601), in the shared block of the matrix mixers
(arXiv 2407.09941)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from matmix.model.calls import weight_of
from matmix.model.initialization import InitRule
from matmix.model.mixers.structured.matrix_mixer import (
    MatrixMixer,
    MixingParameters,
    SharedBlockConfig,
    draw_xavier_normal,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig(SharedBlockConfig):
    """Options of the dense mixer."""


class Dense(MatrixMixer):
    """M_ij = N^-1/2 times a parameter, N = max_seqlen."""

    Config = DenseConfig
    fixed_length = True
    complexity = "O(L^2)"

    def mixing_parameters(self) -> tuple[nn.Module, dict[str, InitRule]]:
        shape = (self.nheads, self.max_seqlen, self.max_seqlen)
        return MixingParameters(M=shape), {"M": draw_xavier_normal}

    @classmethod
    def mixing_flops(cls, d_inner: int, nheads: int, config: DenseConfig, seqlen: int) -> float:
        return 2.0 * seqlen * d_inner

    def entries(self, v: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return weight_of(self.matrix_mixer, "M").unsqueeze(0) * self.max_seqlen**-0.5

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> torch.Tensor:
        return torch.einsum("hts,bshp->bthp", weight_of(self.matrix_mixer, "M"), v) * self.max_seqlen**-0.5
