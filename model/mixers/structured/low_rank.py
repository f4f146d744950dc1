"""Low-rank matrices: linear attention without a normaliser (arXiv 2006.16236), in the shared block of the matrix mixers
(arXiv 2407.09941)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from matmix.kernels import quasiseparable_scan
from matmix.model.mixers.structured.matrix_mixer import QueryKeyConfig, QueryKeyMixer


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankConfig(QueryKeyConfig):
    """Options of the low-rank mixers."""


class LowRank(QueryKeyMixer):
    """M_ij = (N d)^-1/2 q_i . k_j, N = max_seqlen, computed as Q (K^T V)."""

    Config = LowRankConfig
    complexity = "O(L)"
    knows_documents = True

    @classmethod
    def block_rank(cls, config: LowRankConfig) -> int:
        return config.qk_dim

    @classmethod
    def mixing_flops(cls, d_inner: int, nheads: int, config: LowRankConfig, seqlen: int) -> float:
        return 4.0 * d_inner * config.qk_dim

    def scale(self) -> float:
        """In front of every entry."""
        return (self.max_seqlen * self.config.qk_dim) ** -0.5

    def entries(self, v: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.einsum("bthd,bshd->bhts", *self.queries_and_keys(inputs)) * self.scale()

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> torch.Tensor:
        q, k = self.queries_and_keys(inputs)
        if cu_seqlens is not None:
            # Both directions without decay, a token's own term half in each: the sum over its whole document.
            scan = quasiseparable_scan(v, q, k, q, k, None, None, shift=False, self_term="mean", cu_seqlens=cu_seqlens)
            return scan * self.scale()
        state = torch.einsum("bshd,bshp->bhdp", k.expand(v.shape[0], -1, -1, -1), v) * self.scale()
        return torch.einsum("bthd,bhdp->bthp", q.expand(v.shape[0], -1, -1, -1), state)


class LowRankDI(LowRank):
    """q and k are parameters (N, H, d)."""

    fixed_length = True


class LowRankDD(LowRank):
    """q and k are projected from x."""

    data_dependent = True
    sequence_aligned = True
