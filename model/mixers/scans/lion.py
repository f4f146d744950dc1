"""LION: bidirectional linear attention without gates, with one decay per head, or with selective gates
(arXiv 2502.16249).

Parameters have the names and shapes of the authors' attention layer (`qkv`, `proj`, `a_i`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from matmix.kernels import lion_mixer, lion_mixer_is_fused
from matmix.kernels.lion.features import FEATURE_MAPS
from matmix.model.initialization import normal_init
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.scans.lion_forms import (
    LION_FORMS,
    LionState,
    empty_lion_state,
    lion_matrix,
    lion_merge,
    lion_step,
)
from matmix.model.mixers.shared import check_heads, exact_linear, head_count


@dataclass(frozen=True, kw_only=True, slots=True)
class LionConfig:
    """The options that all variants of LION share."""

    headdim: int = 64
    """Channels per head."""
    nheads: int = 0
    """Number of heads; 0 means d_model / headdim."""
    qkv_bias: bool = False
    """Biases in the projection to queries, keys and values."""
    form: Literal["auto", "attention", "chunked", "recurrent"] = "auto"
    """How the result is computed; all three give the same: attention is quadratic in the length, chunked (auto) linear,
    and recurrent goes token by token with states of constant size, for inference."""
    eps: float = 1e-6
    """Added to the sums that rows are divided by."""
    feature_map: Literal["elu", "silu", "silu_norm"] = "silu_norm"
    """The feature map that makes queries and keys positive: elu(x) + 1, silu(x) + 1/2, or the latter divided by its
    length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LionLitConfig(LionConfig):
    """Options of LION without gates."""

    feature_map: Literal["elu", "silu", "silu_norm"] = "elu"
    """The feature map that makes queries and keys positive: elu(x) + 1, silu(x) + 1/2, or the latter divided by its
    length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LionDConfig(LionConfig):
    """Options of LION with a constant decay per head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LionSConfig(LionConfig):
    """Options of LION with selective gates."""

    gate_offset: Literal[0, 1] = 1
    """From a later token j back to i < j decay the gates of i+1 .. j (1) or of i .. j-1 (0)."""
    forward_gate_offset: Literal[0, 1] = 0
    """From an earlier token j on to i > j decay the gates of j+1 .. i (0) or, as in the authors' code, of j .. i-1
    (1)."""


class LionLit(Mixer):
    """LION-Lit: Y = (Q K^T) V over its row sums, linear attention in both directions."""

    Config = LionLitConfig
    causal_form = False
    bidirectional_form = True
    sequence_aligned = True
    complexity = "O(L)"
    row_normalized = True

    def __init__(self, d_model: int, config: LionConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.nheads = head_count(d_model, config)
        d_inner = self.nheads * config.headdim
        self.qkv = nn.Linear(d_model, 3 * d_inner, bias=config.qkv_bias)
        self.proj = nn.Linear(d_inner, d_model)
        self.init_rules = {"proj.weight": normal_init(output_std)}

    @classmethod
    def check(cls, d_model: int, config: LionConfig) -> None:
        place = f"model.mixers.{cls.name}"
        check_heads(cls.name, d_model, config)
        if not 0 < config.eps < math.inf:
            raise ValueError(f"{place}.eps = {config.eps}: must be positive, so that no row is divided by 0")
        for name, known in (("form", LION_FORMS), ("feature_map", FEATURE_MAPS)):
            if getattr(config, name) not in known:
                raise ValueError(f"{place}.{name} = {getattr(config, name)!r}; known: {', '.join(known)}")

    @classmethod
    def block_rank(cls, config: LionConfig) -> int:
        return config.headdim

    @classmethod
    def flops_per_token(cls, d_model: int, config: LionConfig, seqlen: int, causal: bool) -> float:
        nheads, headdim = head_count(d_model, config), config.headdim
        if config.form == "attention":
            mixing = seqlen * 2 * nheads * headdim
        else:
            # Per direction, states, writes and reads take 3 multiply-adds per element of S and z.
            mixing = 2 * 3 * nheads * headdim * (headdim + 1)
        return 2.0 * (4 * d_model * nheads * headdim + mixing)

    def log_gates(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logarithms of the gates for x (B, L, d_model): (B, L, H), (H,) where they are constant, or None."""
        return None

    @property
    def gate_offsets(self) -> dict[str, int]:
        """Which gates lie between two tokens; see `lion_forms`."""
        return {"gate_offset": 1, "forward_gate_offset": 0}

    def gate_logits(self, x: torch.Tensor) -> torch.Tensor | None:
        """The gates before the sigmoid, shaped as `log_gates`, or None."""
        return None

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q with its scale and k, positive, and v: each (..., H, headdim) for x (..., d_model)."""
        return self.split(self.qkv(x))

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `project`, from the output of the projection."""
        q, k, v = qkv.unflatten(-1, (3, self.nheads, self.config.headdim)).unbind(-3)
        features = FEATURE_MAPS[self.config.feature_map]
        # The authors scale the scores before they add eps to the row sums, of which nothing else is left.
        q = features(q) * self.config.headdim**-0.5
        return q.to(v.dtype), features(k).to(v.dtype), v

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None
    ) -> torch.Tensor:
        if cu_seqlens is not None and self.config.form == "attention":
            return self.forward_by_document(x, cu_seqlens)
        qkv = self.qkv(x)
        if self.config.form in ("auto", "chunked") and lion_mixer_is_fused(qkv, self.nheads):
            y = lion_mixer(
                qkv,
                self.gate_logits(x),
                nheads=self.nheads,
                feature_map=self.config.feature_map,
                **self.gate_offsets,
                eps=self.config.eps,
                cu_seqlens=cu_seqlens,
            )
            return self.proj(y)
        q, k, v = self.split(qkv)
        form = LION_FORMS[self.config.form]
        gates = self.log_gates(x, cu_seqlens)
        y = form(q, k, v, gates, **self.gate_offsets, eps=self.config.eps, cu_seqlens=cu_seqlens)
        return self.proj(y.flatten(-2))

    def direction_state(self, batch_size: int) -> LionState:
        """The initial state of one direction of the recurrent form."""
        headdim = self.config.headdim
        return empty_lion_state(batch_size, self.nheads, headdim, headdim, self.proj.weight)

    def direction_step(
        self, x: torch.Tensor, state: LionState, *, backward: bool
    ) -> tuple[torch.Tensor, torch.Tensor, LionState]:
        """One token of one direction of the recurrent form; the backward direction is given the last token first.

        Args: x (B, d_model); state, which is left as it is.
        Returns: y (B, H, headdim) and c (B, H), to be kept until the other direction has reached the token and
            `merge_directions` takes them, and the new state.
        """
        offsets, gates = self.gate_offsets, self.log_gates(x.unsqueeze(1))
        gates = gates.squeeze(1) if gates is not None and gates.dim() == 3 else gates
        delayed = offsets["gate_offset" if backward else "forward_gate_offset"] == 1
        return lion_step(*self.project(x), gates, state, delayed=delayed)

    def merge_directions(
        self, forward: tuple[torch.Tensor, torch.Tensor], backward: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The output (..., d_model) from the y (..., H, headdim) and c (..., H) of both directions."""
        y = lion_merge(*forward, *backward, self.config.eps)
        return self.proj(y.flatten(-2).to(self.proj.weight.dtype))

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.project(x)
        return lion_matrix(q, k, self.log_gates(x), **self.gate_offsets, eps=self.config.eps)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x)[2]

    def combine(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.proj(mixed.flatten(-2))


class LionD(LionLit):
    """LION-D: as LION-Lit, with scores multiplied by lambda^|i - j|, lambda = sigmoid(a_i) per head."""

    Config = LionDConfig

    def __init__(self, d_model: int, config: LionDConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.a_i = nn.Parameter(torch.empty(self.nheads))
        self.init_rules |= {"a_i": normal_init(1.0)}  # as the authors draw it

    def gate_logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.a_i

    def log_gates(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        return F.logsigmoid(self.a_i.to(torch.promote_types(x.dtype, torch.float32)))


class LionS(LionLit):
    """LION-S: as LION-Lit, with scores multiplied by the gates sigmoid(a_i(x)) between their two tokens."""

    Config = LionSConfig

    def __init__(self, d_model: int, config: LionSConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.a_i = nn.Linear(d_model, self.nheads)

    @classmethod
    def check(cls, d_model: int, config: LionSConfig) -> None:
        super().check(d_model, config)
        for name in ("gate_offset", "forward_gate_offset"):
            if getattr(config, name) not in (0, 1):
                raise ValueError(f"model.mixers.{cls.name}.{name} = {getattr(config, name)}: must be 0 or 1")

    @classmethod
    def flops_per_token(cls, d_model: int, config: LionSConfig, seqlen: int, causal: bool) -> float:
        gates = 2.0 * d_model * head_count(d_model, config)
        return super().flops_per_token(d_model, config, seqlen, causal) + gates

    @property
    def gate_offsets(self) -> dict[str, int]:
        return {"gate_offset": self.config.gate_offset, "forward_gate_offset": self.config.forward_gate_offset}

    def gate_logits(self, x: torch.Tensor) -> torch.Tensor:
        """a_i(x) (B, L, H), in float32 at least: bfloat16 would round open gates to 1."""
        return exact_linear(x, self.a_i.weight, self.a_i.bias)

    def log_gates(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        # Never log(sigmoid(.)), which is log(0) for a closed gate.
        return F.logsigmoid(self.gate_logits(x))
