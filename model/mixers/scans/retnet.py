"""Retention (RetNet, arXiv 2307.08621): rotary queries and keys under a fixed decay per head, with a state of fixed
size; also with the same decay in both directions.

Parameters have the names of torchscale's MultiScaleRetention.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from matmix.kernels import gated_norm, quasiseparable_scan, semiseparable_scan
from matmix.kernels.context import within_part
from matmix.model.mixers.base import HeadsConfig, Mixer, head_count, scan_on, zero_state
from matmix.model.positions import apply_rotary, document_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class RetNetConfig(HeadsConfig):
    """Options of the retention mixer."""

    headdim: int = 64
    """Channels of queries and keys per head (even): the rank of the off-diagonal blocks of M. The paper has 256."""
    expand: int = 2
    """Channels of values per head over headdim."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-6
    """Epsilon of the norm of each head's output."""
    bias: bool = False
    """Biases in all five projections."""


class RetNet(Mixer):
    """silu(x W_g) * norm(M v), projected, with M[t, s] = q_t . k_s gamma_h^|t - s| / sqrt(headdim), q and k turned by
    their positions and gamma_h = 1 - 2^(-5 - h); the causal form has s <= t only.

    The norm divides each head's output by its root mean square, without weights. So the paper's other normalisations,
    by sums of rows, would cancel, and are left out.
    """

    Config = RetNetConfig
    causal_form = True
    takes_context = True
    bidirectional_form = True
    rank_option = "headdim"
    static_step = True
    takes_in_place = True
    carries = True

    def __init__(self, d_model: int, config: RetNetConfig, **options):
        super().__init__(d_model, config, **options)
        self.nheads = head_count(d_model, config)
        self.value_headdim = config.expand * config.headdim
        keys, values = self.nheads * config.headdim, self.nheads * self.value_headdim
        self.q_proj, self.k_proj = (nn.Linear(d_model, keys, bias=config.bias) for _ in range(2))
        self.v_proj, self.g_proj = (nn.Linear(d_model, values, bias=config.bias) for _ in range(2))
        self.out_proj = nn.Linear(values, d_model, bias=config.bias)

    @classmethod
    def check(cls, d_model: int, config: RetNetConfig) -> None:
        cls.require_heads(d_model, config)
        cls.require_least(config, expand=1)
        cls.require(config.headdim % 2 == 0, config, "headdim", "must be even, as rotary positions turn pairs")
        cls.require(0 < config.rope_base < math.inf, config, "rope_base", "must be above 0, and finite")
        cls.require(0 <= config.norm_eps < math.inf, config, "norm_eps", "must be 0 or more, and finite")

    @classmethod
    def mixing_flops(cls, d_model: int, config: RetNetConfig, seqlen: int, causal: bool) -> float:
        # The recurrence: per direction, state, write and read take 3 multiply-adds per state element.
        return (1 if causal else 2) * 6.0 * head_count(d_model, config) * config.expand * config.headdim**2

    def log_decay(self, like: Tensor) -> Tensor:
        """log gamma_h (H,), float32 at least."""
        exact = torch.promote_types(like.dtype, torch.float32)
        heads = torch.arange(self.nheads, dtype=exact, device=like.device)
        return torch.log1p(-torch.exp2(-5 - heads))

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (B, L, H, headdim), turned by positions (L,), k scaled, and v (B, L, H, value_headdim)."""
        q, k, v = (layer(x).unflatten(-1, (self.nheads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary(q, k * self.config.headdim**-0.5, positions, self.config.rope_base, "rope")
        return q, k, v

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        q, k, v = self.project(x, document_positions(x.shape[1], cu_seqlens, x.device, self.context))
        decay, rows = self.log_decay(x), {"cu_seqlens": cu_seqlens, "context": self.context}
        if self.causal:
            y = semiseparable_scan(v, q, k, decay, **rows)
        else:
            y = quasiseparable_scan(v, q, k, q, k, decay, decay, shift=False, self_term="mean", **rows)
        return self.combine(y, x)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Returns the number of tokens that each row has seen (batch_size,), none, and zeros (batch_size, H, headdim,
        value_headdim), float32 at least."""
        shape = (batch_size, self.nheads, self.config.headdim, self.value_headdim)
        memory = zero_state(self.k_proj, device, *shape, exact=True)
        return memory.new_zeros(batch_size, dtype=torch.int64), memory

    def forward_with_state(
        self, x: Tensor, state: tuple[Tensor, Tensor], cu_seqlens: Tensor | None = None, in_place: bool = False
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        seen, memory = state
        # Rows may stand at different positions: for the rotation all tokens lie in one row.
        if cu_seqlens is None:
            new = 1 if x.dim() == 2 else x.shape[1]
            positions = seen.unsqueeze(1) + torch.arange(new, device=x.device)
        else:
            new = cu_seqlens.diff().long()
            here = within_part(cu_seqlens, x.shape[1]).diff().long()
            before = torch.repeat_interleave(seen, here, output_size=x.shape[1])
            positions = before + document_positions(x.shape[1], cu_seqlens, x.device, self.context)
        parts = self.project(x.reshape(1, -1, x.shape[-1]), positions.flatten())
        q, k, v = (part.view(*x.shape[:-1], *part.shape[2:]) for part in parts)
        options = {"cu_seqlens": cu_seqlens, "in_place": in_place, "context": self.context}
        y, memory = scan_on(v, q, k, self.log_decay(x), initial_state=memory, **options)
        return self.combine(y, x), (seen.add_(new) if in_place else seen + new, memory)

    step = forward_with_state

    def matrix(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        q, k, _ = self.project(x, positions)
        distance = (positions.unsqueeze(1) - positions).abs()
        decay = (self.log_decay(x)[:, None, None] * distance).exp()
        matrix = torch.einsum("bthd,bshd->bhts", q, k) * decay
        return matrix.tril() if self.causal else matrix

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Norm of each head, gate and output projection."""
        y = mixed.flatten(-2)
        ones = torch.ones(y.shape[-1], dtype=y.dtype, device=y.device)
        y = gated_norm(y, ones, self.g_proj(x), eps=self.config.norm_eps, group_size=self.value_headdim)
        return self.out_proj(y)
