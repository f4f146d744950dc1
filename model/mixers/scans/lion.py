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
from torch import Tensor, nn

from matmix.kernels import lion_mixer, lion_mixer_is_fused
from matmix.kernels.lion.chunked import FEATURE_MAPS
from matmix.model.initialization import normal_init
from matmix.model.mixers.base import Mixer, ScanOrders, check_heads, exact_linear, head_count, state_like
from matmix.model.mixers.scans.lion_forms import (
    LION_FORMS,
    LionState,
    empty_lion_state,
    lion_matrix,
    lion_merge,
    lion_step,
    lion_sums,
    lion_weights,
)

_QUADRATIC_UP_TO = 64
"""Tokens up to which `auto` makes all scores, on a CPU in half the time of chunks."""


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
    """The way in which the result is computed; all three give the same: attention is quadratic in the length, chunked
    linear, and recurrent goes token by token with states of constant size, for inference. auto: the fused kernel where
    it runs, else attention for up to 64 tokens (the patches of small images) and chunked for more."""
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
class GatedLionConfig(LionConfig):
    """Options of the variants with gates."""

    gate_sets: Literal[1, 2] = 1
    """2: of two orders in which images are read, the second has gates of its own (a2_i)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LionDConfig(GatedLionConfig):
    """Options of LION with a constant decay per head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LionSConfig(GatedLionConfig):
    """Options of LION with selective gates."""

    gate_offset: Literal[0, 1] = 1
    """The gates that act from a later token j back to i < j: those of i+1 .. j (1) or of i .. j-1 (0)."""
    forward_gate_offset: Literal[0, 1] = 0
    """The gates that act from an earlier token j on to i > j: those of j+1 .. i (0) or, as in the authors' code, of
    j .. i-1 (1)."""


def check_gate_sets(mixer: str, config: GatedLionConfig) -> None:
    """Raise a one-line ValueError for another number of sets than 1 and 2."""
    if config.gate_sets not in (1, 2):
        raise ValueError(f"model.mixers.{mixer}.gate_sets = {config.gate_sets}: must be 1 or 2")


class LionLit(Mixer):
    """LION-Lit: Y = (Q K^T) V over its row sums, linear attention in both directions."""

    Config = LionLitConfig
    causal_form = False
    bidirectional_form = True
    sequence_aligned = True
    rank_option = "headdim"
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
    def check_scans(cls, config: LionConfig, scans: int, outside: bool) -> None:
        sets = getattr(config, "gate_sets", 1)
        if sets not in (1, scans):
            raise ValueError(
                f"model.mixers.{cls.name}.gate_sets = {sets}: the second set is that of the second of two orders of "
                'images (model.image.scan = "snake" or "both"); set it to 1'
            )

    @classmethod
    def flops_per_token(cls, d_model: int, config: LionConfig, seqlen: int, causal: bool) -> float:
        return cls.flops_in_orders(d_model, config, seqlen, causal, 1)

    @classmethod
    def flops_in_orders(cls, d_model: int, config: LionConfig, seqlen: int, causal: bool, scans: int) -> float:
        """Projections are computed once, whatever the number of orders."""
        nheads, headdim = head_count(d_model, config), config.headdim
        if config.form == "attention":
            mixing = seqlen * 2 * nheads * headdim
        else:
            # Per direction, states, writes and reads take 3 multiply-adds per element of S and z.
            mixing = 2 * 3 * nheads * headdim * (headdim + 1)
        return 2.0 * (4 * d_model * nheads * headdim + scans * mixing)

    def log_gates(self, x: Tensor, cu_seqlens: Tensor | None = None, which: int = 0) -> Tensor | None:
        """Logarithms of the gates for x (B, L, d_model): (B, L, H), (H,) where they are constant, or None. which: 1 for
        the second set of them."""
        logits = self.gate_logits(x, cu_seqlens, which)
        # Never log(sigmoid(.)), which is log(0) for a closed gate.
        return None if logits is None else F.logsigmoid(logits.to(torch.promote_types(x.dtype, torch.float32)))

    @property
    def gate_offsets(self) -> dict[str, int]:
        """Which gates lie between two tokens; see `lion_forms`."""
        return {"gate_offset": 1, "forward_gate_offset": 0}

    def gate_logits(self, x: Tensor, cu_seqlens: Tensor | None = None, which: int = 0) -> Tensor | None:
        """The gates before the sigmoid, shaped as `log_gates`, or None. They are the only place where gates come from,
        for kernels read them, too."""
        return None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q with its scale and k, positive, and v: each (..., H, headdim) for x (..., d_model)."""
        return self.split(self.qkv(x))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the same as `project`, from the output of the projection."""
        q, k, v = qkv.unflatten(-1, (3, self.nheads, self.config.headdim)).unbind(-3)
        features = FEATURE_MAPS[self.config.feature_map]
        # The authors scale the scores before they add eps to the row sums, of which nothing else is left.
        q = features(q) * self.config.headdim**-0.5
        return q.to(v.dtype), features(k).to(v.dtype), v

    def form(self, seqlen: int, cu_seqlens: Tensor | None = None) -> str:
        """The form that computes rows of `seqlen` tokens, or packed documents, where no fused kernel runs."""
        if self.config.form != "auto":
            return self.config.form
        return "attention" if cu_seqlens is None and seqlen <= _QUADRATIC_UP_TO else "chunked"

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        if cu_seqlens is not None and self.config.form == "attention":
            return self.forward_by_document(x, cu_seqlens)
        qkv = self.qkv(x)
        if self.config.form in ("auto", "chunked") and lion_mixer_is_fused(qkv, self.nheads):
            y = lion_mixer(
                qkv, self.gate_logits(x, cu_seqlens), nheads=self.nheads, feature_map=self.config.feature_map,
                **self.gate_offsets, eps=self.config.eps, cu_seqlens=cu_seqlens,
            )  # fmt: skip
            return self.proj(y)
        q, k, v = self.split(qkv)
        form = LION_FORMS[self.form(x.shape[1], cu_seqlens)]
        gates = self.log_gates(x, cu_seqlens)
        y = form(q, k, v, gates, **self.gate_offsets, eps=self.config.eps, cu_seqlens=cu_seqlens)
        return self.proj(y.flatten(-2))

    def forward_in_orders(self, x: Tensor, orders: ScanOrders) -> Tensor:
        """Y = (Q K^T * M) V over its row sums, M the mean of the masks of the orders: what they give is added before
        rows are divided. A position outside has 1 in its row and column of M."""
        qkv = self.qkv(x)
        places, inverse = orders.places, orders.inverse()
        count = len(places)
        # The orders stand beside each other in the batch.
        read = qkv[:, places].flatten(0, 1)
        logits = self.logits_in_orders(x, places)
        if self.config.form in ("auto", "chunked") and lion_mixer_is_fused(read, self.nheads):
            y, sums = lion_mixer(
                read, logits, nheads=self.nheads, feature_map=self.config.feature_map, **self.gate_offsets,
                eps=self.config.eps, return_row_sums=True,
            )  # fmt: skip
            y = y.to(sums.dtype).unflatten(-1, (self.nheads, -1)) * (sums + self.config.eps).unsqueeze(-1)
        else:
            exact = torch.promote_types(x.dtype, torch.float32)
            gates = None if logits is None else F.logsigmoid(logits.to(exact))
            y, sums = lion_sums(self.form(read.shape[1]), *self.split(read), gates, **self.gate_offsets)
        scan = torch.arange(count, device=x.device).unsqueeze(1)
        y = y.unflatten(0, (-1, count))[:, scan, inverse].mean(1)
        sums = sums.unflatten(0, (-1, count))[:, scan, inverse].mean(1)
        if orders.outside is not None:
            y, sums = self.with_outside(qkv, y, sums, orders.outside)
        y = y / (sums + self.config.eps).unsqueeze(-1)
        return self.proj(y.to(qkv.dtype).flatten(-2))

    def logits_in_orders(self, x: Tensor, places: Tensor) -> Tensor | None:
        """`gate_logits` in the orders `places` (orders, n), the second order with the second set of gates where there
        is one: (B * orders, n, H), (H,) or None."""
        sets = [self.gate_logits(x, which=which) for which in range(getattr(self.config, "gate_sets", 1))]
        if sets[0] is None or (sets[0].dim() == 1 and len(sets) == 1):
            return sets[0]
        shape = (x.shape[0], x.shape[1], self.nheads)
        logits = [sets[min(index, len(sets) - 1)].expand(shape)[:, order] for index, order in enumerate(places)]
        return torch.stack(logits, 1).flatten(0, 1)

    def with_outside(self, qkv: Tensor, y: Tensor, sums: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """y (B, L - 1, H, headdim) and sums (B, L - 1, H), before rows are divided, with the position `place` that is
        near to all: (B, L, ...)."""
        q, k, v = (part.to(y.dtype) for part in self.split(qkv))
        others = torch.arange(qkv.shape[1] - 1, device=qkv.device)
        others = others + (others >= place)
        to_it = torch.einsum("blhn,bhn->blh", q[:, others], k[:, place])
        y, sums = y + to_it.unsqueeze(-1) * v[:, place].unsqueeze(1), sums + to_it
        from_it = torch.einsum("bhn,blhn->blh", q[:, place], k)
        own = (from_it.unsqueeze(-1) * v).sum(1, keepdim=True)
        y = torch.cat((y[:, :place], own, y[:, place:]), 1)
        return y, torch.cat((sums[:, :place], from_it.sum(1, keepdim=True), sums[:, place:]), 1)

    def matrix_in_orders(self, x: Tensor, orders: ScanOrders) -> Tensor:
        q, k, _ = self.project(x)
        places, length = orders.places, x.shape[1]
        logits, exact = self.logits_in_orders(x, places), torch.promote_types(x.dtype, torch.float32)
        gates = None if logits is None else F.logsigmoid(logits.to(exact))
        q_read, k_read = (part[:, places].flatten(0, 1) for part in (q, k))
        read = lion_weights(q_read, k_read, gates, **self.gate_offsets).unflatten(0, (-1, len(places)))
        weights = torch.einsum("bihn,bjhn->bhij", q, k).to(exact)
        inside = torch.zeros(length, length, dtype=torch.bool, device=x.device)
        inside[places[0].unsqueeze(1), places[0]] = True
        weights = weights.masked_fill(inside, 0)
        for part, order in zip(read.unbind(1), places, strict=True):
            whole = torch.zeros_like(weights)
            whole[:, :, order.unsqueeze(1), order] = part / len(places)
            weights = weights + whole
        return weights / (weights.sum(-1, keepdim=True) + self.config.eps)

    def direction_state(self, batch_size: int) -> LionState:
        """The initial state of one direction of the recurrent form."""
        headdim = self.config.headdim
        return empty_lion_state(batch_size, self.nheads, headdim, headdim, state_like(self.proj, None))

    def direction_step(self, x: Tensor, state: LionState, *, backward: bool) -> tuple[Tensor, Tensor, LionState]:
        """One token of one direction of the recurrent form; the backward direction is given the last token first.

        Args: x (B, d_model); state, which is left as it is.
        Returns: y (B, H, headdim) and c (B, H), to be kept until the other direction has reached the token and
            `merge_directions` takes them, and the new state.
        """
        offsets, gates = self.gate_offsets, self.log_gates(x.unsqueeze(1))
        gates = gates.squeeze(1) if gates is not None and gates.dim() == 3 else gates
        delayed = offsets["gate_offset" if backward else "forward_gate_offset"] == 1
        return lion_step(*self.project(x), gates, state, delayed=delayed)

    def merge_directions(self, forward: tuple[Tensor, Tensor], backward: tuple[Tensor, Tensor]) -> Tensor:
        """The output (..., d_model) from the y (..., H, headdim) and c (..., H) of both directions."""
        y = lion_merge(*forward, *backward, self.config.eps)
        return self.proj(y.flatten(-2).to(state_like(self.proj, None).dtype))

    def matrix(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x)
        return lion_matrix(q, k, self.log_gates(x), **self.gate_offsets, eps=self.config.eps)

    def values(self, x: Tensor) -> Tensor:
        return self.project(x)[2]

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.proj(mixed.flatten(-2))


class LionD(LionLit):
    """LION-D: as LION-Lit, with scores multiplied by lambda^|i - j|, lambda = sigmoid(a_i) per head."""

    Config = LionDConfig

    def __init__(self, d_model: int, config: LionDConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.a_i = nn.Parameter(torch.empty(self.nheads))
        self.init_rules |= {"a_i": normal_init(1.0)}  # as the authors draw it
        if config.gate_sets == 2:
            self.a2_i = nn.Parameter(torch.empty(self.nheads))
            self.init_rules |= {"a2_i": normal_init(1.0)}

    @classmethod
    def check(cls, d_model: int, config: LionDConfig) -> None:
        super().check(d_model, config)
        check_gate_sets(cls.name, config)

    def gate_logits(self, x: Tensor, cu_seqlens: Tensor | None = None, which: int = 0) -> Tensor:
        return self.a2_i if which else self.a_i


class LionS(LionLit):
    """LION-S: as LION-Lit, with scores multiplied by the gates sigmoid(a_i(x)) between their two tokens."""

    Config = LionSConfig

    def __init__(self, d_model: int, config: LionSConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.a_i = nn.Linear(d_model, self.nheads)
        if config.gate_sets == 2:
            self.a2_i = nn.Linear(d_model, self.nheads)

    @classmethod
    def check(cls, d_model: int, config: LionSConfig) -> None:
        super().check(d_model, config)
        check_gate_sets(cls.name, config)
        for name in ("gate_offset", "forward_gate_offset"):
            if getattr(config, name) not in (0, 1):
                raise ValueError(f"model.mixers.{cls.name}.{name} = {getattr(config, name)}: must be 0 or 1")

    @classmethod
    def flops_in_orders(cls, d_model: int, config: LionSConfig, seqlen: int, causal: bool, scans: int) -> float:
        gates = config.gate_sets * 2.0 * d_model * head_count(d_model, config)
        return super().flops_in_orders(d_model, config, seqlen, causal, scans) + gates

    @property
    def gate_offsets(self) -> dict[str, int]:
        return {"gate_offset": self.config.gate_offset, "forward_gate_offset": self.config.forward_gate_offset}

    def gate_logits(self, x: Tensor, cu_seqlens: Tensor | None = None, which: int = 0) -> Tensor:
        """a_i(x) (B, L, H), in float32 at least: bfloat16 would round open gates to 1."""
        return exact_linear(x, self.a2_i if which else self.a_i)
