"""Softmax attention, causal or bidirectional, with rotary positions that restart at every document: the baseline.
Documents of a packed sequence attend within themselves.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from matmix.model.mixers.attention.packed import attend, attention
from matmix.model.mixers.base import HeadsConfig, Mixer, head_count, zero_state
from matmix.model.positions import apply_rotary, document_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig(HeadsConfig):
    """Options of the attention mixer."""

    headdim: int = 64
    """Channels of queries and keys per head."""
    value_headdim: int = 0
    """Channels of values per head; 0 means headdim."""
    position: Literal["rope", "xpos", "none"] = "rope"
    """Rotary positions, mru-lm's form of xPos, or none."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    bias: bool = False
    """Biases in all four projections."""
    dropout: float = 0.0
    """Dropout on the attention weights."""


class Attention(Mixer):
    """softmax(q k^T / sqrt(headdim)) v through scaled_dot_product_attention."""

    Config = AttentionConfig
    causal_form = True
    takes_context = True
    bidirectional_form = True
    complexity = "O(L^2)"
    row_normalized = True

    def __init__(self, d_model: int, config: AttentionConfig, **options):
        super().__init__(d_model, config, **options)
        self.nheads = head_count(d_model, config)
        self.value_headdim = config.value_headdim or config.headdim
        keys, values = self.nheads * config.headdim, self.nheads * self.value_headdim
        self.q_proj, self.k_proj = (nn.Linear(d_model, keys, bias=config.bias) for _ in range(2))
        self.v_proj = nn.Linear(d_model, values, bias=config.bias)
        self.out_proj = nn.Linear(values, d_model, bias=config.bias)

    @classmethod
    def check(cls, d_model: int, config: AttentionConfig) -> None:
        super().check(d_model, config)
        cls.require_heads(d_model, config)
        cls.require(config.value_headdim >= 0, config, "value_headdim", "must be 0 or more")
        turned = config.position == "none" or config.headdim % 2 == 0
        cls.require(turned, config, "headdim", f"must be even with position = {config.position!r}")

    @classmethod
    def mixing_flops(cls, d_model: int, config: AttentionConfig, seqlen: int, causal: bool) -> float:
        channels = head_count(d_model, config) * (config.headdim + (config.value_headdim or config.headdim))
        return 2.0 * channels * ((seqlen + 1) / 2 if causal else seqlen)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (B, L, H, headdim), turned by `positions` (L,), and v (B, L, H, value_headdim)."""
        q, k, v = (layer(x).unflatten(-1, (self.nheads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.config.position != "none":
            q, k = apply_rotary(q, k, positions, self.config.rope_base, self.config.position)
        return q, k, v

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        q, k, v = self.project(x, document_positions(x.shape[1], cu_seqlens, x.device, self.context))
        y = attention(
            q, k, v, context=self.context, cu_seqlens=cu_seqlens, causal=self.causal, max_seqlen=max_seqlen,
            dropout=self.config.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.out_proj(y.flatten(-2))

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """No keys and no values yet: two tensors (batch_size, 0, H, channels)."""
        channels = (self.config.headdim, self.value_headdim)
        k, v = (zero_state(self.k_proj, device, batch_size, 0, self.nheads, width) for width in channels)
        return k, v

    def forward_with_state(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        past, new = state[0].shape[1], x.shape[1]
        q, k, v = self.project(x, torch.arange(past, past + new, device=x.device))
        k, v = torch.cat((state[0].to(k.dtype), k), 1), torch.cat((state[1].to(v.dtype), v), 1)
        mask = torch.ones(new, past + new, dtype=torch.bool, device=x.device).tril(past)
        return self.out_proj(attend(q, k, v, mask=mask).flatten(-2)), (k, v)

    def matrix(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x, document_positions(x.shape[1], None, x.device))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * self.config.headdim**-0.5
        if self.causal:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        return scores.softmax(-1)
