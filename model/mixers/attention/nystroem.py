"""Nystroem attention (Nystroemformer, arXiv 2102.03902): softmax attention by way of a few landmarks."""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from matmix.kernels.functions import outside_autocast, working
from matmix.model.mixers.attention.packed import attend
from matmix.model.mixers.base import HeadsConfig, Mixer, head_count


@dataclass(frozen=True, kw_only=True, slots=True)
class NystroemConfig(HeadsConfig):
    """Options of Nystroem attention."""

    landmarks: int = 64
    """Means of neighbouring queries, and of keys, that stand for all; documents of no more tokens have attention."""
    iterations: int = 6
    """Steps towards the pseudo-inverse, of third order."""
    bias: bool = False
    """Biases in all four projections."""


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """The iteration of the paper towards the pseudo-inverse of a (..., m, m), rows of which are weights (eq. 11)."""
    # Rows sum to 1, so that only the largest sum of a column is looked for.
    z = a.mT / a.sum(-2).amax(-1)[..., None, None]
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z


def means_of_spans(length: int, count: int, like: Tensor) -> Tensor:
    """The matrix (count, length), typed like `like`, that takes the mean of each of `count` spans of equal length, to
    one token."""
    span = torch.arange(length, device=like.device) * count // length
    inside = (span == torch.arange(count, device=like.device).unsqueeze(1)).to(like.dtype)
    return inside / inside.sum(-1, keepdim=True)


class Nystroem(Mixer):
    """M = softmax(q k'^T) softmax(q' k'^T)^+ softmax(q' k^T), scores over sqrt(headdim), q' and k' the means of q and k
    over `landmarks` spans of equal length, to one token. The paper adds a convolution of v, which is left out."""

    Config = NystroemConfig
    bidirectional_form = True
    sequence_aligned = False
    rank_option = "landmarks"

    def __init__(self, d_model: int, config: NystroemConfig, **options):
        super().__init__(d_model, config, **options)
        self.nheads = head_count(d_model, config)
        inner = self.nheads * config.headdim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, inner, bias=config.bias) for _ in range(3))
        self.out_proj = nn.Linear(inner, d_model, bias=config.bias)

    @classmethod
    def check(cls, d_model: int, config: NystroemConfig) -> None:
        super().check(d_model, config)
        cls.require_heads(d_model, config)
        cls.require_least(config, landmarks=1, iterations=1)

    @classmethod
    def mixing_flops(cls, d_model: int, config: NystroemConfig, seqlen: int, causal: bool) -> float:
        nheads, headdim, landmarks = head_count(d_model, config), config.headdim, config.landmarks
        if seqlen <= landmarks:
            return 4.0 * nheads * headdim * seqlen
        # Scores of and products with two L x m matrices, the means, and the inverse, once for all tokens.
        inverse = 8 * config.iterations * landmarks**3 / seqlen
        return nheads * (12.0 * landmarks * headdim + inverse)

    def is_exact(self, length: int) -> bool:
        """Whether each token would be a landmark, so that M is that of softmax attention."""
        return length <= self.config.landmarks

    def heads(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x).unflatten(-1, (self.nheads, -1))

    @outside_autocast
    def factors(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """The three factors of M (B, H, L, m), (B, H, m, m), (B, H, m, L) in float32 at least; q, k (B, L, H, N)."""
        q, k = (working(part).transpose(1, 2) for part in (q, k))
        means = means_of_spans(q.shape[2], self.config.landmarks, q)
        q = q * self.config.headdim**-0.5
        few_q, few_k = means @ q, means @ k
        middle = pseudo_inverse((few_q @ few_k.mT).softmax(-1), self.config.iterations)
        return (q @ few_k.mT).softmax(-1), middle, (few_q @ k.mT).softmax(-1)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        if cu_seqlens is not None:
            return self.forward_by_document(x, cu_seqlens)
        q, k, v = (self.heads(layer, x) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.is_exact(x.shape[1]):
            return self.out_proj(attend(q, k, v).flatten(-2))
        return self.out_proj(self.mixed(v, q, k).to(v.dtype).flatten(-2))

    @outside_autocast
    def mixed(self, v: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """M v (B, L, H, P), from the right, so that no L x L matrix is made."""
        y = working(v).transpose(1, 2)
        for factor in reversed(self.factors(q, k)):
            y = factor @ y
        return y.transpose(1, 2)

    def matrix(self, x: Tensor) -> Tensor:
        q, k = self.heads(self.q_proj, x), self.heads(self.k_proj, x)
        if self.is_exact(x.shape[1]):
            return (torch.einsum("bthd,bshd->bhts", q, k) * self.config.headdim**-0.5).softmax(-1)
        return reduce(torch.matmul, self.factors(q, k))
