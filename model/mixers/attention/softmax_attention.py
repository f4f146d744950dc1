"""Softmax attention, causal or bidirectional, with rotary positions that restart at every document: the baseline.
Documents of a packed sequence attend within themselves. And attention to near tokens alone, for models of which some
layers attend to all.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from matmix.model.mixers.attention.packed import attend, attend_near, attention, of_each_head
from matmix.model.mixers.base import HeadsConfig, Mixer, RMSNorm, head_count, zero_state
from matmix.model.positions import apply_rotary, document_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig(HeadsConfig):
    """Options of the attention mixer."""

    headdim: int = 64
    """Channels of queries and keys per head."""
    value_headdim: int = 0
    """Channels of values per head; 0 means headdim."""
    kv_heads: int = 0
    """Heads of keys and values, which neighbouring heads of queries share (arXiv 2305.13245); 0 = one for each."""
    qk_norm: bool = False
    """An RMSNorm over the channels of each head of queries and keys, before they are turned (arXiv 2010.04245)."""
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
        self.kv_heads = config.kv_heads or self.nheads
        self.window = self.reach(config, self.causal) or 0
        self.q_proj = nn.Linear(d_model, self.nheads * config.headdim, bias=config.bias)
        self.k_proj = nn.Linear(d_model, self.kv_heads * config.headdim, bias=config.bias)
        self.v_proj = nn.Linear(d_model, self.kv_heads * self.value_headdim, bias=config.bias)
        self.out_proj = nn.Linear(self.nheads * self.value_headdim, d_model, bias=config.bias)
        self.q_norm, self.k_norm = (RMSNorm(config.headdim) if config.qk_norm else nn.Identity() for _ in range(2))

    @classmethod
    def check(cls, d_model: int, config: AttentionConfig) -> None:
        super().check(d_model, config)
        cls.require_heads(d_model, config)
        cls.require(config.value_headdim >= 0, config, "value_headdim", "must be 0 or more")
        heads = head_count(d_model, config)
        shared = config.kv_heads == 0 or (config.kv_heads > 0 and heads % config.kv_heads == 0)
        cls.require(shared, config, "kv_heads", f"must divide the {heads} heads, or be 0 for one to each")
        turned = config.position == "none" or config.headdim % 2 == 0
        cls.require(turned, config, "headdim", f"must be even with position = {config.position!r}")
        cls.require(0 < config.rope_base < math.inf, config, "rope_base", "must be above 0, and finite")
        cls.require(0 <= config.dropout < 1, config, "dropout", "must be at least 0 and below 1")

    @classmethod
    def mixing_flops(cls, d_model: int, config: AttentionConfig, seqlen: int, causal: bool) -> float:
        channels = head_count(d_model, config) * (config.headdim + (config.value_headdim or config.headdim))
        reach = cls.reach(config, causal)
        before = (seqlen - 1) / 2  # tokens on one side, on average
        if reach is not None and reach < seqlen:
            before = reach - reach * (reach + 1) / (2 * seqlen)
        return 2.0 * channels * (1 + (before if causal else 2 * before))

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, L, H, headdim) and k (B, L, kv_heads, headdim), turned by `positions` (L,), and v (B, L, kv_heads,
        value_headdim)."""
        q, k, v = self.heads(x)
        return *self.turned(q, k, positions), v

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`project` without positions."""
        q = self.q_proj(x).unflatten(-1, (self.nheads, -1))
        k, v = (layer(x).unflatten(-1, (self.kv_heads, -1)) for layer in (self.k_proj, self.v_proj))
        return self.q_norm(q), self.k_norm(k), v

    def turned(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.position == "none":
            return q, k
        return apply_rotary(q, k, positions, self.config.rope_base, self.config.position)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        q, k, v = self.project(x, document_positions(x.shape[1], cu_seqlens, x.device, self.context))
        y = attention(
            q, k, v, context=self.context, cu_seqlens=cu_seqlens, causal=self.causal, max_seqlen=max_seqlen,
            dropout=self.config.dropout if self.training else 0.0, window=self.window,
        )  # fmt: skip
        return self.out_proj(y.flatten(-2))

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """No keys and no values yet: two tensors (batch_size, 0, kv_heads, channels)."""
        channels = (self.config.headdim, self.value_headdim)
        k, v = (zero_state(self.k_proj, device, batch_size, 0, self.kv_heads, width) for width in channels)
        return k, v

    def forward_with_state(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        past, new = state[0].shape[1], x.shape[1]
        q, k, v = self.project(x, torch.arange(past, past + new, device=x.device))
        k, v = torch.cat((state[0].to(k.dtype), k), 1), torch.cat((state[1].to(v.dtype), v), 1)
        mask = torch.ones(new, past + new, dtype=torch.bool, device=x.device).tril(past)
        y = attend(q, *(of_each_head(part, q) for part in (k, v)), mask=mask)
        return self.out_proj(y.flatten(-2)), (k, v)

    def values(self, x: Tensor) -> Tensor:
        q, _, v = self.heads(x)
        return of_each_head(v, q)

    def matrix(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x, document_positions(x.shape[1], None, x.device))
        k = of_each_head(k, q)
        scores = torch.einsum("bthd,bshd->bhts", q, k) * self.config.headdim**-0.5
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        if self.window:
            seen = seen.triu(-self.window).tril(self.window)
        if self.causal:
            seen = seen.tril()
        return scores.masked_fill(~seen, float("-inf")).softmax(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalAttentionConfig(AttentionConfig):
    """Options of attention within a window."""

    window: int = 64
    """How far apart tokens that see each other are at most: so many before a token, and behind it where attention is
    bidirectional. (Windows of 128 tokens, half on each side, are 64 here.)"""


class LocalAttention(Attention):
    """Attention to tokens within a window (arXiv 2004.05150)."""

    Config = LocalAttentionConfig
    complexity = "O(L)"

    @classmethod
    def check(cls, d_model: int, config: LocalAttentionConfig) -> None:
        super().check(d_model, config)
        cls.require_least(config, window=1)

    @classmethod
    def reach(cls, config: LocalAttentionConfig, causal: bool) -> int:
        return config.window

    def forward_with_state(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The state holds the last `window` keys and values, keys not turned yet: their positions count from the first
        that is left, which no output depends on."""
        past, (q, k, v) = state[0].shape[1], self.heads(x)
        k, v = torch.cat((state[0].to(k.dtype), k), 1), torch.cat((state[1].to(v.dtype), v), 1)
        positions = torch.arange(k.shape[1], device=x.device)
        (q, _), (_, turned) = self.turned(q, q, positions[past:]), self.turned(k, k, positions)
        near = (of_each_head(part, q) for part in (turned, v))
        y = attend_near(q, *near, self.window, causal=True, offset=past)
        # Copied, as a part would keep the whole in memory.
        kept = (part if part.shape[1] <= self.window else part[:, -self.window :].clone() for part in (k, v))
        return self.out_proj(y.flatten(-2)), tuple(kept)
