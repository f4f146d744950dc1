"""Matrices of queries and keys in the shared block of the matrix mixers (arXiv 2407.09941).

Those of low rank are linear attention without a normaliser (arXiv 2006.16236). Softmax attention is there to be
compared with the other matrices in that block; the usual attention layer is `attention`.
"""

import torch
from torch import Tensor

from matmix.kernels import quasiseparable_scan
from matmix.model.mixers.attention.packed import attention
from matmix.model.mixers.structured.matrix_mixer import QueryKeyConfig, QueryKeyMixer


class LowRank(QueryKeyMixer):
    """M_ij = (N d)^-1/2 q_i . k_j, N = max_seqlen, computed as Q (K^T V)."""

    rank_option = "qk_dim"
    knows_documents = True

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: QueryKeyConfig, seqlen: int) -> float:
        return 4.0 * d_inner * config.qk_dim

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        return torch.einsum("bthd,bshd->bhts", *self.queries_and_keys(inputs)) * self.scale()

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        q, k = self.queries_and_keys(inputs)
        if cu_seqlens is not None or self.context is not None:
            # Both directions without decay, a token's own term half in each: the sum over its whole document.
            rows = {"cu_seqlens": cu_seqlens, "context": self.context}
            scan = quasiseparable_scan(v, q, k, q, k, None, None, shift=False, self_term="mean", **rows)
            return scan * self.scale()
        state = torch.einsum("bshd,bshp->bhdp", k.expand(v.shape[0], -1, -1, -1), v) * self.scale()
        return torch.einsum("bthd,bhdp->bthp", q.expand(v.shape[0], -1, -1, -1), state)


class LowRankDI(LowRank):
    """q and k are parameters (N, H, d)."""

    fixed_length = True


class LowRankDD(LowRank):
    """q and k are projected from x."""

    data_dependent = sequence_aligned = True


class Softmax(QueryKeyMixer):
    """M_ij = softmax over j of q_i . k_j / sqrt(d)."""

    complexity = "O(L^2)"
    activated_inputs = False
    row_normalized = True
    knows_documents = True

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: QueryKeyConfig, seqlen: int) -> float:
        return 2.0 * seqlen * (nheads * config.qk_dim + d_inner)

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        scores = torch.einsum("bthd,bshd->bhts", *self.queries_and_keys(inputs))
        return (scores * self.config.qk_dim**-0.5).softmax(-1)

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        q, k = (part.to(v.dtype).expand(v.shape[0], -1, -1, -1) for part in self.queries_and_keys(inputs))
        return attention(q, k, v, context=self.context, cu_seqlens=cu_seqlens, causal=False, max_seqlen=max_seqlen)


class SoftmaxDI(Softmax):
    """q and k are parameters (N, H, d)."""

    fixed_length = True


class SoftmaxDD(Softmax):
    """q and k are projected from x."""

    data_dependent = sequence_aligned = True
