"""Softmax attention, causal or bidirectional, with rotary positions that restart at every document: the baseline.
Documents of a packed sequence attend within themselves.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.model.mixers.base import HeadsConfig, Mixer, head_count, zero_state
from matmix.model.positions import apply_rotary, by_documents, document_positions

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # an older torch; the general form below serves every device
    varlen_attn = None


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v per head and document: q, k (B, L, H, D), v (B, L, H, P) -> (B, L, H, P).

    With cu_seqlens (B == 1) a token attends within its own document only, and not even NaN in another one reaches it.
    In half precision on CUDA that is one variable-length flash kernel; elsewhere documents of similar length (within a
    factor of 2) are padded together, so that at most half of the work is padding.
    """
    if cu_seqlens is None:
        return attend(q, k, v, causal=causal, dropout=dropout)
    width = max(q.shape[-1], v.shape[-1])
    flash = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    if flash and varlen_attn is not None and dropout == 0.0 and width % 8 == 0 and width <= 256:
        longest = max_seqlen or int(cu_seqlens.diff().max())
        window = (-1, 0) if causal else (-1, -1)
        parts = (part[0] for part in of_one_width(q, k, v))
        scale = q.shape[-1] ** -0.5
        y = varlen_attn(*parts, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=window)
        return y[..., : v.shape[-1]].unsqueeze(0)
    return attention_by_length(q[0], k[0], v[0], cu_seqlens, causal, dropout).unsqueeze(0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """scaled_dot_product_attention of q (B, L, H, D), k (B, S, H, D), v (B, S, H, P) -> (B, L, H, P).

    Its flash kernels want D = P. With other widths it would fall back on a form that keeps the L x S matrix.
    """
    parts, scale = (part.transpose(1, 2) for part in of_one_width(q, k, v)), q.shape[-1] ** -0.5
    y = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=causal, dropout_p=dropout, scale=scale)
    return y.transpose(1, 2)[..., : v.shape[-1]]


def of_one_width(*parts: Tensor) -> list[Tensor]:
    """Fills channels up with zeros to the widest width, which changes neither scores nor the first outputs."""
    width = max(part.shape[-1] for part in parts)
    return [part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1])) for part in parts]


def attention_by_length(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, dropout: float) -> Tensor:
    """The general form for tensors (L, H, channels): one padded attention per class of document lengths."""

    def attended(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        # Padding stands at the end, where a causal query does not look.
        mask = None if real is None or causal else real[:, None, None, :]
        return attend(q, k, v, causal=causal, mask=mask, dropout=dropout)

    return by_documents(attended, cu_seqlens, lambda length: (length - 1).bit_length(), q, k, v)


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
        q, k, v = self.project(x, document_positions(x.shape[1], cu_seqlens, x.device))
        dropout = self.config.dropout if self.training else 0.0
        y = packed_attention(q, k, v, causal=self.causal, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, dropout=dropout)
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
