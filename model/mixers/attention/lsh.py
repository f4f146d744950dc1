"""Attention by hashing (Reformer, arXiv 2001.04451): softmax attention between tokens whose hashes are alike."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels.functions import outside_autocast, working
from matmix.model.mixers.base import ExactLinear, HeadsConfig, Mixer, exact_linear, head_count
from matmix.model.mixers.scans.features import directions

SELF = -1e5
"""The score of a token for itself: it attends to itself where there is no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LSHAttentionConfig(HeadsConfig):
    """Options of attention by hashing."""

    rounds: int = 4
    """Hashes of each token; it attends to all that one of them brings near."""
    buckets: int = 32
    """Values of a hash, even. The paper has two for each chunk, so that hashing costs O(L^2)."""
    chunk: int = 32
    """Tokens that stand together when they are sorted by bucket."""
    bias: bool = False
    """Biases in all three projections."""


class LSHAttention(Mixer):
    """M = softmax(q_i . k_j) over the j that stand in the chunk of i or in one beside it, in one of the orders at
    least; k = q / |q|, and a token meets itself only where it is alone.

    Each round sorts the tokens of a document by the bucket argmax [q R, -q R], those of one bucket by position, and
    cuts them into chunks. R is random, as a Gaussian matrix, and the same in all heads and layers. Chunks look to both
    sides here, as there is no causal form: which chunk a token is in depends on all others.
    """

    Config = LSHAttentionConfig
    bidirectional_form = True
    sequence_aligned = False
    not_float8 = ("qk_proj",)

    def __init__(self, d_model: int, config: LSHAttentionConfig, **options):
        super().__init__(d_model, config, **options)
        self.nheads = head_count(d_model, config)
        inner = self.nheads * config.headdim
        self.qk_proj = ExactLinear(d_model, inner, bias=config.bias)
        self.v_proj = nn.Linear(d_model, inner, bias=config.bias)
        self.out_proj = nn.Linear(inner, d_model, bias=config.bias)

    @classmethod
    def check(cls, d_model: int, config: LSHAttentionConfig) -> None:
        super().check(d_model, config)
        cls.require_heads(d_model, config)
        cls.require_least(config, rounds=1, buckets=2, chunk=2)
        cls.require(config.buckets % 2 == 0, config, "buckets", "must be even")

    @classmethod
    def mixing_flops(cls, d_model: int, config: LSHAttentionConfig, seqlen: int, causal: bool) -> float:
        keys = min(3 * config.chunk, seqlen)
        return config.rounds * head_count(d_model, config) * config.headdim * (4.0 * keys + config.buckets)

    def queries(self, x: Tensor) -> Tensor:
        """q (B, H, L, headdim), in float32 at least: a hash of rounded numbers may be another one."""
        return exact_linear(x, self.qk_proj).unflatten(-1, (self.nheads, -1)).transpose(1, 2)

    @outside_autocast
    def orders(self, q: Tensor) -> Tensor:
        """The tokens in the order of each round, (B, H, rounds, L) int64."""
        rounds, buckets, length = self.config.rounds, self.config.buckets, q.shape[2]
        R = directions(rounds * buckets // 2, q.shape[-1], q)
        turned = (q.detach() @ R.mT).unflatten(-1, (rounds, -1)).transpose(2, 3)
        bucket = torch.cat((turned, -turned), -1).argmax(-1)
        # Tokens of one bucket keep their order, as no two numbers are equal.
        return (bucket * length + torch.arange(length, device=q.device)).argsort(-1)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        if cu_seqlens is not None:
            return self.forward_by_document(x, cu_seqlens)
        v = self.values(x)
        return self.out_proj(self.attend(self.queries(x), v).to(v.dtype).flatten(-2))

    @outside_autocast
    def attend(self, q: Tensor, v: Tensor) -> Tensor:
        """M v (B, L, H, headdim) in float32 at least; q (B, H, L, headdim), v (B, L, H, headdim)."""
        length, size = q.shape[2], self.config.chunk
        order = self.orders(q)
        rank = order.argsort(-1)
        filled = F.pad(order, (0, -length % size))  # with tokens that are masked

        def sorted_chunks(part: Tensor) -> Tensor:
            """(B, H, L, width) -> (B, H, rounds, chunks, size, width), sorted."""
            index = filled.flatten(2).unsqueeze(-1)
            return torch.take_along_dim(part, index, 2).unflatten(2, (filled.shape[2], -1, size))

        def around(part: Tensor) -> Tensor:
            """Chunks, and with each those beside it: (..., chunks, size, width) -> (..., chunks, 3 size, width)."""
            padded = F.pad(part, (0, 0, 0, 0, 1, 1))
            return torch.cat((padded[..., :-2, :, :], part, padded[..., 2:, :, :]), -2)

        near = sorted_chunks(rank.transpose(2, 3) // size)  # the chunk of each token in each round
        place = torch.arange(filled.shape[-1], device=q.device).view(-1, size, 1)
        real = around((place < length).to(torch.int8)).mT > 0  # (chunks, 1, 3 size)
        token = sorted_chunks(torch.arange(length, device=q.device).unsqueeze(-1).expand(*q.shape[:3], 1))
        scores = sorted_chunks(q) @ around(sorted_chunks(F.normalize(q, dim=-1))).mT
        scores = scores.masked_fill(token == around(token).mT, SELF)
        # What several rounds find counts once.
        times = sum(
            ((one.unsqueeze(-1) - other.unsqueeze(-2)).abs() <= 1).to(scores.dtype)
            for one, other in zip(near.unbind(-1), around(near).unbind(-1), strict=True)
        )
        scores = (scores - times.clamp(min=1).log()).masked_fill(~real, float("-inf"))
        total = scores.logsumexp(-1, keepdim=True)
        y = (scores - total).exp() @ around(sorted_chunks(working(v).transpose(1, 2)))
        y, total = (torch.take_along_dim(part.flatten(3, 4), rank.unsqueeze(-1), 3) for part in (y, total))
        return (total.softmax(2) * y).sum(2).transpose(1, 2)

    def matrix(self, x: Tensor) -> Tensor:
        q = self.queries(x)
        chunk = self.orders(q).argsort(-1) // self.config.chunk
        seen = ((chunk.unsqueeze(-1) - chunk.unsqueeze(-2)).abs() <= 1).any(2)
        scores = q @ F.normalize(q, dim=-1).mT
        itself = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
        return scores.masked_fill(itself, SELF).masked_fill(~seen, float("-inf")).softmax(-1)
