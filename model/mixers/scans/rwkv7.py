"""RWKV-7's time mixing (arXiv 2503.14456, section 4): a generalised delta rule with decays per channel.

Two things differ from the authors' model, since a mixer sees neither other layers nor how many there are: values have
no residual from the first layer's values, and all layers start with the token shifts and decays of the first one.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels.documents import shift_right
from matmix.model.calls import weights_of
from matmix.model.initialization import constant_init, normal_init
from matmix.model.mixers.base import Mixer, zero_state
from matmix.model.mixers.continued import tokens_before
from matmix.model.mixers.scans.delta_rule import delta_rule_step, diagonal_delta_rule, transition_matrix, unit_vectors


@dataclass(frozen=True, kw_only=True, slots=True)
class RWKV7Config:
    """Options of RWKV-7's time mixing."""

    headdim: int = 64
    """Channels per head, of keys and of values: the rank of the blocks of M below the diagonal."""
    decay_rank: int = 0
    """Hidden width of the small MLP that makes the decays; 0 = about 1.8 sqrt(d_model), by 32."""
    rate_rank: int = 0
    """Hidden width of the one that makes the in-context learning rates; 0 = about 1.8 sqrt(d_model), by 32."""
    gate_rank: int = 0
    """Hidden width of the one that makes the output gate; 0 = about 0.6 d_model^0.8, by 32."""
    chunk_size: int = 32
    """Tokens per chunk of the parallel form, up to 128. Changes speed only."""


class RWKV7Parts(NamedTuple):
    """The inputs of the recurrence, (B, L, heads, headdim), and the gate of its output."""

    r: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    """The normalised removal key, kappa_hat: what is erased from the state is first read with it."""
    b: Tensor
    """-rate * kappa_hat: what is erased is written to the state with it."""
    log_decay: Tensor
    gate: Tensor
    """(B, L, d_model)"""


class RWKV7(Mixer):
    """S_t = S_{t-1} (diag(w_t) - kappa_hat_t^T (a_t * kappa_hat_t)) + v_t^T k_t, read by r_t; then a norm per head,
    the bonus (r . (r_k * k)) v, a gate, and out_proj.

    The bonus is added behind the norm, where it is not part of what M gives: it belongs to `combine`.
    """

    Config = RWKV7Config
    causal_form = True
    takes_context = True
    rank_option = "headdim"
    static_step = True
    carries = True
    rounded = ("w1", "w2", "a1", "a2", "g1", "g2")

    def __init__(self, d_model: int, config: RWKV7Config, **options):
        super().__init__(d_model, config, **options)
        self.nheads = d_model // config.headdim
        ranks = self.ranks(d_model, config)
        for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "k_k", "k_a", "r_k"):
            setattr(self, name, nn.Parameter(torch.empty(d_model)))
        for name, rank in zip("wag", ranks, strict=True):
            setattr(self, f"{name}1", nn.Parameter(torch.empty(d_model, rank)))
            setattr(self, f"{name}2", nn.Parameter(torch.empty(rank, d_model)))
        self.receptance, self.key, self.value = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.ln_x = nn.GroupNorm(self.nheads, d_model, eps=1e-5 * config.headdim)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        self.init_rules |= {f"x_{name}": partial(draw_shift, power=power) for name, power in powers.items()} | {
            "w0": draw_decay,
            "a0": constant_init(0.0),
            "k_k": constant_init(0.85),
            "k_a": constant_init(1.0),
            "r_k": constant_init(0.0),
            # The sigmoids in front start at 1/2: a gate of order 1, so that the output starts at output_std's scale.
            "g2": normal_init(2 * ranks[2] ** -0.5),
            "ln_x.weight": constant_init(1.0),
        }

    def sums(self) -> dict[str, tuple[float, float]]:
        return {name: (len(getattr(self, name)), 1.0) for name in self.rounded}

    @staticmethod
    def ranks(d_model: int, config: RWKV7Config) -> tuple[int, int, int]:
        """Hidden widths for decays, learning rates and gate; automatic ones as in the authors' code."""

        def by_32(width: float) -> int:
            return max(32, 32 * round(width / 32))

        small = by_32(1.8 * d_model**0.5)
        return config.decay_rank or small, config.rate_rank or small, config.gate_rank or by_32(0.6 * d_model**0.8)

    @classmethod
    def check(cls, d_model: int, config: RWKV7Config) -> None:
        cls.require_least(config, headdim=2, decay_rank=0, rate_rank=0, gate_rank=0)
        cls.require(1 <= config.chunk_size <= 128, config, "chunk_size", "must be from 1 to 128")
        if d_model % config.headdim:
            raise ValueError(
                f"model.mixers.{cls.name}.headdim = {config.headdim} does not divide d_model = {d_model}; change one"
            )

    @classmethod
    def mixing_flops(cls, d_model: int, config: RWKV7Config, seqlen: int, causal: bool) -> float:
        width, chunk = config.headdim, min(config.chunk_size, seqlen)
        # Scores 4, products of them with values and states 4, the triangular system 1; then the map of the state.
        recurrence = d_model * (9 * chunk + 4 * width + width**2 / chunk)
        return 2.0 * (2 * d_model * sum(cls.ranks(d_model, config)) + recurrence)

    def parts(self, x: Tensor, before: Tensor | None = None) -> RWKV7Parts:
        """The recurrence's inputs from x (B, L, d_model) and the tokens before each; None = those in x itself."""
        before = shift_right(x, None) if before is None else before
        change = before - x
        x_r, x_w, x_k, x_v, x_a, x_g = (torch.addcmul(x, change, getattr(self, f"x_{name}")) for name in "rwkvag")
        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        gate = torch.sigmoid(x_g @ self.g1) @ self.g2
        # From here on in float32 at least: bfloat16 would round the decay of long memories to 1.
        exact = torch.promote_types(x.dtype, torch.float32)
        decay = self.w0.to(exact) + torch.tanh(x_w @ self.w1) @ self.w2
        log_decay = -math.exp(-0.5) * torch.sigmoid(decay)  # w is from exp(-0.607) to 1
        rate = torch.sigmoid(self.a0.to(exact) + (x_a @ self.a1) @ self.a2)
        k = k.to(exact)
        removal = unit_vectors(self.by_head(k * self.k_k))
        k = k * (1 + (rate - 1) * self.k_a)
        r, k, v, rate, log_decay = (self.by_head(part) for part in (r.to(exact), k, v, rate, log_decay))
        return RWKV7Parts(r, k, v, removal, -rate * removal, log_decay, gate)

    def by_head(self, x: Tensor) -> Tensor:
        """(..., d_model) -> (..., H, headdim)."""
        return x.unflatten(-1, (self.nheads, -1))

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        parts = self.parts(x, shift_right(x, cu_seqlens, self.context))
        y, _ = diagonal_delta_rule(parts[:6], self.config.chunk_size, cu_seqlens=cu_seqlens, context=self.context)
        return self.finish(y, parts)

    def finish(self, y: Tensor, parts: RWKV7Parts) -> Tensor:
        """Norm per head, bonus, gate and output projection of y (B, L, H, headdim)."""
        weight, bias = (part.to(y.dtype) for part in weights_of(self.ln_x, "weight", "bias"))
        normed = F.group_norm(y.flatten(0, 1).flatten(1), self.nheads, weight, bias, self.ln_x.eps)
        normed = normed.unflatten(0, y.shape[:2])
        bonus = (parts.r * self.by_head(self.r_k) * parts.k).sum(-1, keepdim=True) * parts.v
        return self.out_proj((normed + bonus.flatten(-2)).to(parts.gate.dtype) * parts.gate)

    def matrix(self, x: Tensor) -> Tensor:
        """M[t, s] = r_t^T A_t ... A_{s+1} k_s with A_t = diag(w_t) + b_t a_t^T, (B, H, L, L)."""
        r, k, _, a, b, log_decay, _ = self.parts(x)
        return transition_matrix(torch.diag_embed(log_decay.exp()) + b.unsqueeze(-1) * a.unsqueeze(-2), k, r)

    def values(self, x: Tensor) -> Tensor:
        return self.parts(x).v

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.finish(mixed, self.parts(x))

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Zeros: the token before (batch_size, d_model), and the recurrence's state (batch_size, H, headdim, headdim),
        keys by values."""
        memory = (self.nheads, self.config.headdim, self.config.headdim)
        last = zero_state(self.key, device, batch_size, self.d_model)
        return last, zero_state(self.key, device, batch_size, *memory, exact=True)

    def forward_with_state(
        self, x: Tensor, state: tuple[Tensor, Tensor], cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        last, memory = state
        before, last = tokens_before(x, last, cu_seqlens, self.context)
        parts = self.parts(x, before)
        if x.shape[1] == 1 and cu_seqlens is None:
            r, k, v, a, b, log_decay = (part.squeeze(1) for part in parts[:6])
            y, memory = delta_rule_step(memory, log_decay.exp(), a, b, k, v.to(k.dtype), r)
            y = y.unsqueeze(1)
        else:
            options = {"cu_seqlens": cu_seqlens, "chunk_size": self.config.chunk_size, "context": self.context}
            y, memory = diagonal_delta_rule(parts[:6], initial_state=memory, **options)
        return self.finish(y, parts), (last, memory)


def draw_shift(shape: torch.Size, generator: torch.Generator, *, power: float) -> Tensor:
    """The initial share of the token before in each channel: 1 - (i / d_model)^power."""
    return 1 - (torch.arange(shape[0]) / shape[0]) ** power


def draw_decay(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Slow decays in the first channels (0.999 per token), faster ones in the last (0.9)."""
    return -6.5 + 5 * (torch.arange(shape[0]) / max(shape[0] - 1, 1)) ** 0.85
