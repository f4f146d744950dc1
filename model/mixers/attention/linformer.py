"""Linformer (arXiv 2006.04768): attention to a fixed number of mixtures of all tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from matmix.model.initialization import normal_init
from matmix.model.mixers.attention.packed import attend
from matmix.model.mixers.base import HeadsConfig, Mixer, head_count


@dataclass(frozen=True, kw_only=True, slots=True)
class LinformerConfig(HeadsConfig):
    """Options of Linformer."""

    rank: int = 128
    """Mixtures of the keys and of the values that each token attends to."""
    share_kv: bool = False
    """The same mixtures of keys and of values."""
    bias: bool = False
    """Biases in all four projections."""


class Linformer(Mixer):
    """softmax(q (E k)^T / sqrt(headdim)) F v, where E and F (rank, N), N = max_seqlen, are parameters of all heads.

    So M = softmax(q (E k)^T / sqrt(headdim)) F has no higher rank than E has rows.
    """

    Config = LinformerConfig
    bidirectional_form = True
    sequence_aligned = False
    fixed_length = True
    rank_option = "rank"

    def __init__(self, d_model: int, config: LinformerConfig, *, max_seqlen: int, **options):
        super().__init__(d_model, config, max_seqlen=max_seqlen, **options)
        self.nheads = head_count(d_model, config)
        inner = self.nheads * config.headdim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, inner, bias=config.bias) for _ in range(3))
        self.out_proj = nn.Linear(inner, d_model, bias=config.bias)
        self.E = nn.Parameter(torch.empty(config.rank, max_seqlen))
        self.F = self.E if config.share_kv else nn.Parameter(torch.empty(config.rank, max_seqlen))
        # A mixture is as large as a token, on average.
        self.init_rules |= dict.fromkeys(("E",) if config.share_kv else ("E", "F"), normal_init(max_seqlen**-0.5))

    @classmethod
    def check(cls, d_model: int, config: LinformerConfig) -> None:
        super().check(d_model, config)
        cls.require_heads(d_model, config)
        cls.require_least(config, rank=1)

    @classmethod
    def mixing_flops(cls, d_model: int, config: LinformerConfig, seqlen: int, causal: bool) -> float:
        return 8.0 * config.rank * head_count(d_model, config) * config.headdim

    def mixtures(self, layer: nn.Linear, weights: Tensor, x: Tensor) -> Tensor:
        """(B, rank, H, headdim) of a projection of x."""
        return torch.einsum("rs,bshp->brhp", weights, layer(x).unflatten(-1, (self.nheads, -1)))

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.nheads, -1))
        y = attend(q, self.mixtures(self.k_proj, self.E, x), self.mixtures(self.v_proj, self.F, x))
        return self.out_proj(y.flatten(-2))

    def matrix(self, x: Tensor) -> Tensor:
        q, k = (layer(x).unflatten(-1, (self.nheads, -1)) for layer in (self.q_proj, self.k_proj))
        scores = torch.einsum("bthd,bshd,rs->bhtr", q, k, self.E) * self.config.headdim**-0.5
        return scores.softmax(-1) @ self.F
