"""Softmax attention, causal or bidirectional, with rotary positions that restart at every document: the
baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from matmix.model.initialization import normal_init
from matmix.model.mixers.attention.packed_attention import attend, packed_attention
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.shared import check_heads, head_count, state_like
from matmix.model.positions import apply_rotary, document_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Options of the attention mixer."""

    headdim: int = 64
    """Channels of queries and keys per head."""
    nheads: int = 0
    """Number of heads; 0 means d_model / headdim."""
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
    bidirectional_form = True
    sequence_aligned = True
    complexity = "O(L^2)"
    row_normalized = True

    def __init__(self, d_model: int, config: AttentionConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.nheads = head_count(d_model, config)
        self.value_headdim = config.value_headdim or config.headdim
        self.q_proj = nn.Linear(d_model, self.nheads * config.headdim, bias=config.bias)
        self.k_proj = nn.Linear(d_model, self.nheads * config.headdim, bias=config.bias)
        self.v_proj = nn.Linear(d_model, self.nheads * self.value_headdim, bias=config.bias)
        self.out_proj = nn.Linear(self.nheads * self.value_headdim, d_model, bias=config.bias)
        self.init_rules = {"out_proj.weight": normal_init(output_std)}

    @classmethod
    def check(cls, d_model: int, config: AttentionConfig) -> None:
        check_heads(cls.name, d_model, config)
        if config.value_headdim < 0:
            raise ValueError(f"model.mixers.attention.value_headdim = {config.value_headdim}: must be 0 or more")
        if config.position != "none" and config.headdim % 2:
            raise ValueError(
                f"model.mixers.attention.headdim = {config.headdim}: must be even with position = {config.position!r}"
            )

    @classmethod
    def flops_per_token(cls, d_model: int, config: AttentionConfig, seqlen: int, causal: bool) -> float:
        nheads = head_count(d_model, config)
        value_headdim = config.value_headdim or config.headdim
        projections = 2 * d_model * nheads * (config.headdim + value_headdim)
        seen = (seqlen + 1) / 2 if causal else seqlen
        return 2.0 * (projections + seen * nheads * (config.headdim + value_headdim))

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k (B, L, H, headdim), turned by `positions` (L,), and v (B, L, H, value_headdim)."""
        q = self.q_proj(x).unflatten(-1, (self.nheads, -1))
        k = self.k_proj(x).unflatten(-1, (self.nheads, -1))
        v = self.v_proj(x).unflatten(-1, (self.nheads, -1))
        if self.config.position != "none":
            q, k = apply_rotary(q, k, positions, self.config.rope_base, self.config.position)
        return q, k, v

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None
    ) -> torch.Tensor:
        q, k, v = self.project(x, document_positions(x.shape[1], cu_seqlens, x.device))
        dropout = self.config.dropout if self.training else 0.0
        y = packed_attention(q, k, v, causal=self.causal, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, dropout=dropout)
        return self.out_proj(y.flatten(-2))

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """No keys and no values yet: two tensors (batch_size, 0, H, channels)."""
        like = state_like(self.k_proj, device)
        return (
            like.new_empty(batch_size, 0, self.nheads, self.config.headdim),
            like.new_empty(batch_size, 0, self.nheads, self.value_headdim),
        )

    def forward_with_state(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        past, new = state[0].shape[1], x.shape[1]
        q, k, v = self.project(x, torch.arange(past, past + new, device=x.device))
        k, v = torch.cat((state[0].to(k.dtype), k), 1), torch.cat((state[1].to(v.dtype), v), 1)
        mask = torch.ones(new, past + new, dtype=torch.bool, device=x.device).tril(past)
        return self.out_proj(attend(q, k, v, mask=mask).flatten(-2)), (k, v)

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.project(x, document_positions(x.shape[1], None, x.device))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * self.config.headdim**-0.5
        if self.causal:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        return scores.softmax(-1)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_proj(x).unflatten(-1, (self.nheads, -1))

    def combine(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(mixed.flatten(-2))
