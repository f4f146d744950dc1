"""LION (arXiv 2502.16249): bidirectional linear attention without gates, with one decay per head, or with selective
gates; in three forms that agree: full attention, chunked, and a recurrence in each direction.

All take q, k (B, L, H, N) after the feature map and the scale, v (B, L, H, P), and the gates, and return

    Y = (Q K^T * M) V / (row sums of Q K^T * M + eps)    (B, L, H, P).

M[i, j] is 1 on the diagonal and else the product of the gates g_k between the two tokens:

    i > j: k = j + 1 - a .. i - a    with a = forward_gate_offset
    i < j: k = i + b .. j - 1 + b    with b = gate_offset

a = 0 and b = 1 are the masks D of the authors' text: each gate acts between a token and its left neighbour, and M is
symmetric. a = b = 0 is the recurrence of the same text, a causal scan and its mirror image: each token's own gate acts
on what it receives. a = b = 1 is what the authors' code computes: it acts on what the token sends out.

Parameters have the names and shapes of the authors' attention layer (`qkv`, `proj`, `a_i`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import lion_mixer, lion_mixer_is_fused, quasiseparable_scan, semiseparable_step
from matmix.kernels.context import Context
from matmix.kernels.documents import shift_right
from matmix.kernels.functions import working
from matmix.kernels.lion.chunked import FEATURE_MAPS
from matmix.model.initialization import normal_init
from matmix.model.mixers.base import (
    ExactLinear,
    ScanOrders,
    exact_linear,
    gate_sums,
    head_count,
    recomputed,
    weights_per_token,
)
from matmix.model.mixers.scans.features import FeatureConfig, FeatureMixer

_QUADRATIC_UP_TO = 64
"""Tokens up to which `auto` makes all scores, on a CPU in half the time of chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LionConfig(FeatureConfig):
    """The options that all variants of LION share."""

    qkv_bias: bool = False
    """Biases in the projection to queries, keys and values."""
    form: Literal["auto", "attention", "chunked", "recurrent"] = "auto"
    """The way in which the result is computed; all three give the same: attention is quadratic in the length, chunked
    linear, and recurrent goes token by token with states of constant size, for inference. auto: the fused kernel where
    it runs, else attention for up to 64 tokens (the patches of small images) and chunked for more."""
    eps: float = 1e-6
    """Added to the sums that rows are divided by."""
    feature_map: Literal["elu", "silu", "silu_norm", "performer", "rfa", "cosformer", "polynomial", "taylor"] = (
        "silu_norm"
    )
    """The feature map that makes queries and keys positive: elu(x) + 1, silu(x) + 1/2, the latter divided by its
    length, or one of scans/features.py, which no fused kernel has: the scan alone is one then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LionDConfig(LionConfig):
    """Options of LION with a constant decay per head."""

    gate_sets: Literal[1, 2] = 1
    """2: of two orders in which images are read, the second has gates of its own (a2_i)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LionSConfig(LionDConfig):
    """Options of LION with selective gates."""

    gate_offset: Literal[0, 1] = 1
    """The gates that act from a later token j back to i < j: those of i+1 .. j (1) or of i .. j-1 (0)."""
    forward_gate_offset: Literal[0, 1] = 0
    """The gates that act from an earlier token j on to i > j: those of j+1 .. i (0) or, as in the authors' code, of
    j .. i-1 (1)."""


# -- the three forms ---------------------------------------------------------------------------------------------------


class LionGates(NamedTuple):
    """The gates g_k, and which of them lie between two tokens."""

    logs: Tensor | None
    """Their logarithms (B, L, H), (H,) if they are the same for every token, or None for no decay."""
    gate_offset: int
    forward_gate_offset: int

    def delayed(self, steps: int, cu_seqlens: Tensor | None = None, context: Context | None = None) -> Tensor | None:
        """`delayed_gates` of them."""
        return None if self.logs is None else delayed_gates(self.logs, steps, cu_seqlens, context)


def delayed_gates(logs: Tensor, steps: int, cu_seqlens: Tensor | None = None, context: Context | None = None) -> Tensor:
    """Each token's gate, or (steps 1) that of the token before it in its document."""
    return shift_right(logs, cu_seqlens, context) if steps and logs.dim() == 3 else logs


def lion_weights(q: Tensor, k: Tensor, gates: LionGates) -> Tensor:
    """Q K^T * M, (B, H, L, L), entry by entry."""
    weights = working(torch.einsum("bihn,bjhn->bhij", q, k))
    if gates.logs is not None:
        below = gate_sums(gates.delayed(gates.forward_gate_offset), q.shape[1])
        above = gate_sums(gates.delayed(1 - gates.gate_offset), q.shape[1]).mT
        weights = weights * (below + above).exp()  # each is 0 where the other is not
    return weights


def lion_matrix(q: Tensor, k: Tensor, gates: LionGates, eps: float) -> Tensor:
    """The mixer with its rows normalised, (B, H, L, L), entry by entry."""
    weights = lion_weights(q, k, gates)
    return weights / (weights.sum(-1, keepdim=True) + eps)


def lion(
    form: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: LionGates,
    eps: float,
    cu_seqlens: Tensor | None = None,
    context: Context | None = None,
) -> Tensor:
    """Y by one of the forms: "attention", O(L^2), which knows no documents; "chunked", attention inside chunks and
    states between them, O(L), and of parts of rows the only one; "recurrent", token by token."""
    if form == "attention":
        assert cu_seqlens is None, "the attention form is called for one document at a time"
        return torch.einsum("bhij,bjhp->bihp", lion_matrix(q, k, gates, eps).to(v.dtype), v)
    if form == "recurrent":
        y, sums = lion_recurrence(q, k, v, gates, cu_seqlens)
        return (y / (sums + eps).unsqueeze(-1)).to(v.dtype)
    return quasiseparable_scan(
        v, q, k, q, k, gates.delayed(gates.forward_gate_offset, cu_seqlens, context), gates.logs, shift=False,
        self_term="mean", normalize="row_sum", eps=eps, gate_offset=gates.gate_offset, cu_seqlens=cu_seqlens,
        context=context,
    )  # fmt: skip


def lion_sums(form: str, q: Tensor, k: Tensor, v: Tensor, gates: LionGates) -> tuple[Tensor, Tensor]:
    """(Q K^T * M) V (B, L, H, P) and the row sums of Q K^T * M (B, L, H), in float32 at least, by a form."""
    q, k, v = working(q), working(k), working(v)
    if form == "attention":
        weights = lion_weights(q, k, gates)
        return torch.einsum("bhij,bjhp->bihp", weights, v), weights.sum(-1).transpose(1, 2)
    if form == "recurrent":
        return lion_recurrence(q, k, v, gates)
    # A row's sum is what it makes of ones.
    sums = quasiseparable_scan(
        F.pad(v, (0, 1), value=1.0), q, k, q, k, gates.delayed(gates.forward_gate_offset), gates.logs, shift=False,
        self_term="mean", gate_offset=gates.gate_offset,
    )  # fmt: skip
    return sums[..., :-1], sums[..., -1]


class LionState(NamedTuple):
    """The state that one direction carries from token to token, in float32 at least."""

    products: Tensor
    """S (B, H, N, P): sum of k v^T over the tokens so far, decayed."""
    keys: Tensor
    """z (B, H, N): sum of k, decayed alike."""
    log_gate: Tensor
    """(B, H): the gate of the last token, for directions in which it acts one step later."""


def lion_step(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, state: LionState, delayed: Tensor
) -> tuple[Tensor, Tensor, LionState]:
    """One token of one direction: q, k (B, H, N), v (B, H, P), log_gate (B, H), (H,) or None.

        S = g S + k v^T,  z = g z + k,  y = q S - 1/2 (q . k) v,  c = q . z - 1/2 q . k

    delayed (B, 1): g is the gate of the token before this one in the direction's own sense, else this token's.
    Returns: y (B, H, P), c (B, H) and the new state; the given one is left as it is.
    """
    exact = state.keys.dtype
    q, k, v = q.to(exact), k.to(exact), v.to(exact)
    products, keys, last, gate = *state, None
    if log_gate is not None:
        log_gate = log_gate.to(exact).expand_as(last)
        gate = torch.where(delayed, last, log_gate)
        keys, last = gate.exp().unsqueeze(-1) * keys, log_gate
    keys = keys + k
    own = 0.5 * (q * k).sum(-1)
    y, products = semiseparable_step(v, q, k, gate, products, diagonal=-own)
    return y, (q * keys).sum(-1) - own, LionState(products, keys, last)


def lion_recurrence(
    q: Tensor, k: Tensor, v: Tensor, gates: LionGates, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The numbers of `lion_sums` in one loop of L steps. Step t is token t of the forward direction and token L - 1 - t
    of the backward one, which stand behind each other in the batch; both states are of constant size.

    Kept are y and c alone, in one cell a token, to which both directions add. With gradients also the states before
    every N-th step, which are twice as large as y; the backward pass runs the steps between them again.
    """
    (batch, length, nheads, d_state), exact = q.shape, torch.promote_types(v.dtype, torch.float32)
    shapes = ((d_state, v.shape[-1]), (d_state,), ())
    state = LionState(*(v.new_zeros(2 * batch, nheads, *shape, dtype=exact) for shape in shapes))
    backward = (torch.arange(2 * batch, device=q.device) >= batch).unsqueeze(1)
    delayed = (backward & (gates.gate_offset == 1)) | (~backward & (gates.forward_gate_offset == 1))
    edges = None
    if cu_seqlens is not None:
        positions = torch.arange(length, device=q.device)
        first, last = torch.isin(positions, cu_seqlens), torch.isin(positions + 1, cu_seqlens)
        edges = torch.stack((first, last.flip(0)), 1)

    def steps(begin: int, end: int, state: LionState) -> tuple[Tensor, Tensor, LionState]:
        """y and c of steps begin .. end - 1, (2 B, steps, H, P) and (2 B, steps, H), and the state after them."""
        outputs = []
        for t in range(begin, end):
            if edges is not None:  # where a document begins in a direction, its sums start again
                state = LionState(*(part.masked_fill(edges[t].view(2, *[1] * (part.dim() - 1)), 0) for part in state))
            q_t, k_t, v_t = (torch.cat((part[:, t], part[:, -1 - t])) for part in (q, k, v))
            gate = gates.logs
            if gate is not None and gate.dim() == 3:
                gate = torch.cat((gate[:, t], gate[:, -1 - t]))
            *given, state = lion_step(q_t, k_t, v_t, gate, state, delayed)
            outputs.append(given)
        y, c = (torch.stack(parts, 1) for parts in zip(*outputs, strict=True))
        return y, c, state

    cells = v.new_zeros(v.shape, dtype=exact), v.new_zeros(v.shape[:-1], dtype=exact)
    for begin in range(0, length, d_state):
        end = min(begin + d_state, length)
        *given, state = recomputed(steps, begin, end, state)
        for cell, part in zip(cells, given, strict=True):
            cell[:, begin:end] += part[:batch]
            cell[:, length - end : length - begin] += part[batch:].flip(1)
    return cells


# -- the mixers --------------------------------------------------------------------------------------------------------


class LionLit(FeatureMixer):
    """LION-Lit: Y = (Q K^T) V over its row sums, linear attention in both directions."""

    Config = LionConfig
    bidirectional_form = True
    row_normalized = True

    def __init__(self, d_model: int, config: LionConfig, *, output_std: float, **options):
        super().__init__(d_model, config, output_std=output_std, **options)
        self.nheads = head_count(d_model, config)
        d_inner = self.nheads * config.headdim
        self.qkv = nn.Linear(d_model, 3 * d_inner, bias=config.qkv_bias)
        self.proj = nn.Linear(d_inner, d_model)
        self.init_rules = {"proj.weight": normal_init(output_std)}

    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": 3 * (self.proj.in_features,)}

    @classmethod
    def check(cls, d_model: int, config: LionConfig) -> None:
        super().check(d_model, config)
        cls.require(0 < config.eps < math.inf, config, "eps", "must be positive, so that no row is divided by 0")

    @classmethod
    def check_scans(cls, config: LionConfig, scans: int, outside: bool) -> None:
        one = 'turns vectors by one order of positions; set model.image.scan = "rows" and class_outside = false'
        cls.require(config.feature_map != "cosformer" or (scans == 1 and not outside), config, "feature_map", one)
        sets = getattr(config, "gate_sets", 1)
        if sets not in (1, scans):
            raise ValueError(
                f"model.mixers.{cls.name}.gate_sets = {sets}: the second set is that of the second of two orders of "
                'images (model.image.scan = "snake" or "both"); set it to 1'
            )

    @classmethod
    def why_no_context(cls, config: LionConfig, causal: bool) -> str:
        if config.form in ("auto", "chunked"):
            return ""
        return f'needs whole rows on one rank with form = "{config.form}"'

    @classmethod
    def mixing_flops(cls, d_model: int, config: LionConfig, seqlen: int, causal: bool) -> float:
        channels = head_count(d_model, config) * config.headdim
        features, making = cls.block_rank(config), cls.feature_flops(d_model, config)
        if config.form == "attention":
            return 2.0 * seqlen * channels * (1 + features / config.headdim) + making
        # Per direction, states, writes and reads take 3 multiply-adds per element of S and z.
        return 2.0 * 2 * 3 * head_count(d_model, config) * features * (config.headdim + 1) + making

    @classmethod
    def flops_in_orders(cls, d_model: int, config: LionConfig, seqlen: int, causal: bool, scans: int) -> float:
        """Projections are computed once, whatever the number of orders."""
        weights = weights_per_token(cls, d_model, config, causal)
        return 2.0 * weights + scans * cls.mixing_flops(d_model, config, seqlen, causal)

    @property
    def gate_offsets(self) -> dict[str, int]:
        """Which gates lie between two tokens; see `LionGates`."""
        usual = {"gate_offset": 1, "forward_gate_offset": 0}
        return {name: getattr(self.config, name, offset) for name, offset in usual.items()}

    def gate_logits(self, x: Tensor, cu_seqlens: Tensor | None = None, which: int = 0) -> Tensor | None:
        """The gates before the sigmoid for x (B, L, d_model): (B, L, H), (H,) where they are constant, or None. Gates
        come from nowhere else, for kernels read these, too. which: 1 for the second set of them."""
        return None

    def gates(self, logits: Tensor | None) -> LionGates:
        # Never log(sigmoid(.)), which is log(0) for a closed gate.
        logs = None if logits is None else F.logsigmoid(working(logits))
        return LionGates(logs, **self.gate_offsets)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q with its scale and k, positive (B, L, H, features), and v (B, L, H, headdim) for x (B, L, d_model)."""
        return self.split(self.qkv(x))

    def split(self, qkv: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the same as `project`, from the output of the projection."""
        q, k, v = qkv.unflatten(-1, (3, self.nheads, self.config.headdim)).unbind(-3)
        q, k = self.features(q, k, self.turns(qkv.shape[1], cu_seqlens, qkv.device))
        # The authors scale the scores before they add eps to the row sums, of which nothing else is left.
        return (q * self.config.headdim**-0.5).to(v.dtype), k.to(v.dtype), v

    def form(self, seqlen: int, cu_seqlens: Tensor | None = None) -> str:
        """The form that computes rows of `seqlen` tokens, or packed documents, where no fused kernel runs."""
        if self.config.form != "auto":
            return self.config.form
        short = cu_seqlens is None and self.context is None and seqlen <= _QUADRATIC_UP_TO
        return "attention" if short else "chunked"

    def fused(self, qkv: Tensor, logits: Tensor | None, **options: Any) -> Any:
        """Returns `lion_mixer` of the projection's output; None where no fused kernel runs."""
        if self.config.form not in ("auto", "chunked") or self.config.feature_map not in FEATURE_MAPS:
            return None
        if not lion_mixer_is_fused(qkv, self.nheads):
            return None
        kept = {"nheads": self.nheads, "feature_map": self.config.feature_map, "eps": self.config.eps}
        return lion_mixer(qkv, logits, **kept, **self.gate_offsets, **options)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        if cu_seqlens is not None and self.config.form == "attention":
            return self.forward_by_document(x, cu_seqlens)
        qkv, logits = self.qkv(x), self.gate_logits(x, cu_seqlens)
        y = self.fused(qkv, logits, cu_seqlens=cu_seqlens, context=self.context)
        if y is None:
            form, rows = self.form(x.shape[1], cu_seqlens), (cu_seqlens, self.context)
            y = lion(form, *self.split(qkv, cu_seqlens), self.gates(logits), self.config.eps, *rows).flatten(-2)
        return self.proj(y)

    def forward_in_orders(self, x: Tensor, orders: ScanOrders) -> Tensor:
        """Y = (Q K^T * M) V over its row sums, M the mean of the masks of the orders: what they give is added before
        rows are divided. A position outside has 1 in its row and column of M."""
        qkv = self.qkv(x)
        places, inverse = orders.places, orders.inverse()
        # The orders stand beside each other in the batch.
        read, logits = qkv[:, places].flatten(0, 1), self.logits_in_orders(x, places)
        fused = self.fused(read, logits, return_row_sums=True)
        if fused is None:
            y, sums = lion_sums(self.form(read.shape[1]), *self.split(read), self.gates(logits))
        else:
            y, sums = fused
            y = y.to(sums.dtype).unflatten(-1, (self.nheads, -1)) * (sums + self.config.eps).unsqueeze(-1)
        scan = torch.arange(len(places), device=x.device).unsqueeze(1)
        y, sums = (part.unflatten(0, (-1, len(places)))[:, scan, inverse].mean(1) for part in (y, sums))
        if orders.outside is not None:
            y, sums = self.with_outside(qkv, y, sums, orders.outside)
        y = y / (sums + self.config.eps).unsqueeze(-1)
        return self.proj(y.to(qkv.dtype).flatten(-2))

    def logits_in_orders(self, x: Tensor, places: Tensor) -> Tensor | None:
        """`gate_logits` in the orders `places` (orders, n), each with its set: (B * orders, n, H), (H,) or None."""
        sets = [self.gate_logits(x, which=which) for which in range(getattr(self.config, "gate_sets", 1))]
        if sets[0] is None or (sets[0].dim() == 1 and len(sets) == 1):
            return sets[0]
        shape = (x.shape[0], x.shape[1], self.nheads)
        logits = [sets[min(index, len(sets) - 1)].expand(shape)[:, order] for index, order in enumerate(places)]
        return torch.stack(logits, 1).flatten(0, 1)

    def with_outside(self, qkv: Tensor, y: Tensor, sums: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """y (B, L - 1, H, headdim) and sums (B, L - 1, H) with the position `place`, near to all: (B, L, ...)."""
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
        gates = self.gates(self.logits_in_orders(x, places))
        q_read, k_read, _ = self.split(self.qkv(x)[:, places].flatten(0, 1))
        read = lion_weights(q_read, k_read, gates).unflatten(0, (-1, len(places)))
        weights = working(torch.einsum("bihn,bjhn->bhij", q, k))
        inside = torch.zeros(length, length, dtype=torch.bool, device=x.device)
        inside[places[0].unsqueeze(1), places[0]] = True
        weights = weights.masked_fill(inside, 0)
        for part, order in zip(read.unbind(1), places, strict=True):
            whole = torch.zeros_like(weights)
            whole[:, :, order.unsqueeze(1), order] = part / len(places)
            weights = weights + whole
        return weights / (weights.sum(-1, keepdim=True) + self.config.eps)

    def matrix(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x)
        return lion_matrix(q, k, self.gates(self.gate_logits(x)), self.config.eps)

    def values(self, x: Tensor) -> Tensor:
        return self.project(x)[2]

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.proj(mixed.flatten(-2))


class LionD(LionLit):
    """LION-D: as LION-Lit, with scores multiplied by lambda^|i - j|, lambda = sigmoid(a_i) per head."""

    Config = LionDConfig

    def __init__(self, d_model: int, config: LionDConfig, **options):
        super().__init__(d_model, config, **options)
        for name in ("a_i", "a2_i")[: config.gate_sets]:
            setattr(self, name, nn.Parameter(torch.empty(self.nheads)))
            self.init_rules |= {name: normal_init(1.0)}  # as the authors draw it

    def gate_logits(self, x: Tensor, cu_seqlens: Tensor | None = None, which: int = 0) -> Tensor:
        return self.a2_i if which else self.a_i


class LionS(LionLit):
    """LION-S: as LION-Lit, with scores multiplied by the gates sigmoid(a_i(x)) between their two tokens."""

    Config = LionSConfig

    def __init__(self, d_model: int, config: LionSConfig, **options):
        super().__init__(d_model, config, **options)
        for name in ("a_i", "a2_i")[: config.gate_sets]:
            setattr(self, name, ExactLinear(d_model, self.nheads))

    def gate_logits(self, x: Tensor, cu_seqlens: Tensor | None = None, which: int = 0) -> Tensor:
        """a_i(x) (B, L, H), in float32 at least: bfloat16 would round open gates to 1."""
        return exact_linear(x, self.a2_i if which else self.a_i)
