"""Softmax attention in the shared block of the matrix mixers (arXiv 2407.09941), for comparison with the other matrices
in that block. The usual attention layer is `attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from matmix.model.mixers.attention.packed_attention import packed_attention
from matmix.model.mixers.structured.matrix_mixer import QueryKeyConfig, QueryKeyMixer


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxConfig(QueryKeyConfig):
    """Options of softmax attention in the shared block."""


class Softmax(QueryKeyMixer):
    """M_ij = softmax over j of q_i . k_j / sqrt(d)."""

    Config = SoftmaxConfig
    complexity = "O(L^2)"
    activated_inputs = False
    row_normalized = True
    knows_documents = True

    @classmethod
    def mixing_flops(cls, d_inner: int, nheads: int, config: SoftmaxConfig, seqlen: int) -> float:
        return 2.0 * seqlen * (nheads * config.qk_dim + d_inner)

    def entries(self, v: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        scores = torch.einsum("bthd,bshd->bhts", *self.queries_and_keys(inputs))
        return (scores * self.config.qk_dim**-0.5).softmax(-1)

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> torch.Tensor:
        q, k = (part.to(v.dtype).expand(v.shape[0], -1, -1, -1) for part in self.queries_and_keys(inputs))
        return packed_attention(q, k, v, causal=False, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)


class SoftmaxDI(Softmax):
    """q and k are parameters (N, H, d)."""

    fixed_length = True


class SoftmaxDD(Softmax):
    """q and k are projected from x."""

    data_dependent = True
    sequence_aligned = True
