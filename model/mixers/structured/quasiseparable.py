"""Quasiseparable matrices in the shared block of the matrix mixers (arXiv 2407.09941): Hydra's mixer with one B and C
for both directions and all heads, for comparison with the other matrices."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import quasiseparable_scan
from matmix.kernels.functions import outside_autocast, working
from matmix.kernels.mru.chunked import state_matrices
from matmix.kernels.mru.constructions import construction_products, state_elements
from matmix.kernels.scan_layer.chunked import StepSizes
from matmix.kernels.semiseparable.chunked.autograd import move_gates
from matmix.model.calls import weight_of, weights_of
from matmix.model.initialization import InitRule, constant_init
from matmix.model.mixers.scans.scan_block import draw_dt_bias, side_matrices, with_diagonal
from matmix.model.mixers.structured.matrix_mixer import MatrixMixer, SharedBlockConfig, draw_xavier_normal

CHUNK = 16
"""Tokens of a chunk where transitions are matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuasiseparableConfig(SharedBlockConfig):
    """Options of the quasiseparable mixers."""

    d_state: int = 64
    """Width of B and C, which all heads share: the rank of the off-diagonal blocks of M. The papers' code takes
    nheads * qk_dim."""
    dt_min: float = 0.001
    """Smallest step size at initialisation."""
    dt_max: float = 0.1
    """Largest step size at initialisation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuasiseparableDDConfig(QuasiseparableConfig):
    """Options of the quasiseparable mixer whose B, C and step sizes are made from the data."""

    formula: Literal["shifted", "elementwise"] = "shifted"
    """Hydra's shift, with one A, B and C for both directions ("shifted"), as the papers' code has it, or m_ij as the
    text defines quasiseparable matrices, with A, b and c of its own for each direction ("elementwise")."""
    above: Literal["c_i", "c_j"] = "c_i"
    """What formula "elementwise" has above the diagonal: c_i^T A_i ... A_(j-1) b_j ("c_i"), as the text's page, or
    c_j^T A_j ... A_(i+1) b_i ("c_j"), as its source."""
    transition: Literal["scalar", "full"] = "scalar"
    """A number ("scalar"), or with formula "elementwise" a d_state x d_state matrix ("full") for every token and head;
    d_state is then to be small, 32 at most."""


class Side(NamedTuple):
    """What one direction's half of M is made of."""

    q: Tensor
    """C, (B, L, 1, d_state)."""
    k: Tensor
    """B, shaped like C."""
    log_decay: Tensor
    """(B, L, H), float32 at least."""
    dt: Tensor
    """Step sizes, shaped like the log decays."""


class Quasiseparable(MatrixMixer):
    """M = tril_strict + triu_strict + diag(D), as in Hydra: token i reads with C_(i-1) (C_(i+1)) the state that the
    tokens before (after) it left, B_j dt_j decayed from j + 1 to i - 1 (i + 1 to j - 1)."""

    Config = QuasiseparableConfig
    rank_option = "d_state"
    not_float8 = ("matrix_mixer.fc_D",)
    not_decayed = ("matrix_mixer.A_log", "matrix_mixer.dt_bias", "matrix_mixer.D")
    data_dependent = True  # the diagonal is, in either form
    holds_identity = False
    knows_documents = True

    def __init__(self, d_model: int, config: QuasiseparableConfig, **options):
        super().__init__(d_model, config, **options)
        self.matrix_mixer.fc_D = nn.Linear(self.d_inner, self.nheads, bias=False)

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        steps = partial(draw_dt_bias, low=self.config.dt_min, high=self.config.dt_max, floor=1e-4)
        heads = (self.nheads,)
        return {"A_log": (heads, constant_init(0.0)), "D": (heads, constant_init(1.0)), "dt_bias": (heads, steps)}

    @classmethod
    def check(cls, d_model: int, config: QuasiseparableConfig) -> None:
        super().check(d_model, config)
        cls.require_steps(config)

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: QuasiseparableConfig, seqlen: int) -> float:
        # Per direction, decay, write and read take 3 multiply-adds per state element.
        return 2.0 * 2 * 3 * d_inner * config.d_state

    def sides(self, v: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Side, Side]:
        """C, B, log decays and step sizes of the two directions."""
        raise NotImplementedError

    def diagonal(self, v: Tensor) -> Tensor:
        """D of every token and head, (B, L, H) in float32 at least: `fc_D` of v plus D."""
        product = working(self.matrix_mixer.fc_D(v.flatten(-2)))
        return product + weight_of(self.matrix_mixer, "D").to(product.dtype)

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        below, above = side_matrices(*self.sides(v, inputs), shift=True)
        return with_diagonal(below + above, self.diagonal(v))

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        return self.scan(v, *self.sides(v, inputs), self.diagonal(v), cu_seqlens, shift=True)

    def scan(
        self,
        v: Tensor,
        forward: Side,
        backward: Side,
        diagonal: Tensor,
        cu_seqlens: Tensor | None,
        *,
        shift: bool,
        gate_offset: int = 0,
    ) -> Tensor:
        """`quasiseparable_scan` of two sides."""
        vectors = (part.to(v.dtype) for side in (forward, backward) for part in side[:2])
        return quasiseparable_scan(
            v, *vectors, forward.log_decay, backward.log_decay, input_scale_forward=forward.dt,
            input_scale_backward=backward.dt, diagonal=diagonal, shift=shift, gate_offset=gate_offset,
            cu_seqlens=cu_seqlens, context=self.context,
        )  # fmt: skip


class QuasiseparableDI(Quasiseparable):
    """B and C are parameters (N, 2 d_state), and one step size per head serves all positions and both directions."""

    fixed_length = True

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        shape = (self.max_seqlen, 2 * self.config.d_state)
        return super().mixing_parameters() | {"BC": (shape, draw_xavier_normal)}

    def sides(self, v: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Side, Side]:
        batch, length = v.shape[:2]
        BC, dt_bias, A_log = weights_of(self.matrix_mixer, "BC", "dt_bias", "A_log")
        B, C = BC.to(v.dtype).expand(batch, -1, -1).chunk(2, -1)
        exact = torch.promote_types(v.dtype, torch.float32)
        dt = F.softplus(dt_bias.to(exact))
        log_decay = dt * -A_log.to(exact).exp()
        log_decay, dt = (part.expand(batch, length, 2, -1) for part in (log_decay, dt))
        q, k = C.unsqueeze(2), B.unsqueeze(2)
        return Side(q, k, log_decay[..., 0, :], dt[..., 0, :]), Side(q, k, log_decay[..., 1, :], dt[..., 1, :])


class QuasiseparableDD(Quasiseparable):
    """B, C and the step sizes of both directions are projected from x.

    With formula "elementwise" M is the definition of quasiseparable matrices to the letter, each direction with A, b =
    B dt and c = C of its own: m_ij = c_i^T A_i ... A_(j+1) b_j below the diagonal, D_i on it, and c_i^T A_i ... A_(j-1)
    b_j above it, or with above "c_j" the transpose of what is below, c_j^T A_j ... A_(i+1) b_i. A_i is a number
    e^(-dt_i a), or with transition "full" the matrix diag(e^(-dt_i a)) Q_i, Q_i the orthogonal Cayley transform of
    numbers projected from x: of norm at most 1, so that no product grows.
    """

    Config = QuasiseparableDDConfig
    sequence_aligned = True

    @property
    def elementwise(self) -> bool:
        """Whether M is made by the definition, without a shift."""
        return self.config.formula == "elementwise"

    @property
    def full(self) -> bool:
        """Whether transitions are matrices."""
        return self.config.transition == "full"

    @property
    def swapped(self) -> bool:
        """Whether above the diagonal b reads and c writes, with the gates of i + 1 to j."""
        return self.config.above == "c_j"

    @property
    def knows_documents(self) -> bool:
        return not self.full

    @classmethod
    def check(cls, d_model: int, config: QuasiseparableDDConfig) -> None:
        super().check(d_model, config)
        defined = config.formula == "elementwise"
        cls.require(defined or config.above == "c_i", config, "above", 'needs formula = "elementwise"')
        if config.transition == "full":
            cls.require(defined, config, "transition", 'needs formula = "elementwise"')
            otherwise = 'must be from 2 to 32 with transition = "full"'
            cls.require(2 <= config.d_state <= 32, config, "d_state", otherwise)

    @classmethod
    def why_no_context(cls, config: QuasiseparableDDConfig, causal: bool) -> str:
        if config.transition == "full":
            return 'needs whole rows on one rank with transition = "full"'
        return super().why_no_context(config, causal)

    @classmethod
    def input_widths(cls, nheads: int, config: QuasiseparableDDConfig) -> tuple[int, ...]:
        return (config.d_state,) * (4 if config.formula == "elementwise" else 2)

    @classmethod
    def direct_numbers(cls, config: QuasiseparableDDConfig) -> int:
        return 2 + (2 * state_elements("cayley", config.d_state) if config.transition == "full" else 0)

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        parameters = super().mixing_parameters()
        if self.elementwise:
            for name in ("A_log", "dt_bias"):
                shape, rule = parameters[name]
                rates = (self.config.d_state,) if self.full and name == "A_log" else ()
                parameters[name] = ((2, *shape, *rates), rule)
        return parameters

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: QuasiseparableDDConfig, seqlen: int) -> float:
        if config.transition == "scalar":
            return super().matrix_flops(d_inner, nheads, config, seqlen)
        # Of each direction: transitions, their products, rows of M, and what values add to outputs and states.
        N, made = config.d_state, construction_products("cayley")
        of_transitions = nheads * (made * N**3 + (N**2 + N) * (N + CHUNK))
        return 2.0 * 2 * (of_transitions + d_inner * (CHUNK + 2 * N))

    def sides(self, v: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Side, Side]:
        *vectors, direct = inputs
        dt, log_decay = StepSizes.apply(direct, *weights_of(self.matrix_mixer, "dt_bias", "A_log"), 2, 0.0, math.inf)
        k, q, *others = (part.unsqueeze(2) for part in vectors)
        k_backward, q_backward = others or (k, q)
        forward_decay, backward_decay = log_decay.unbind(-2)
        forward_scale, scale = dt.unbind(-2)
        if self.swapped:
            # b dt is of the token that reads, where the scan scales the one that is read. Both sides have as many q.
            q_backward, k_backward = (k_backward * scale.unsqueeze(-1)).to(v.dtype), q_backward
            q, k, k_backward = (part.expand_as(q_backward) for part in (q, k, k_backward))
            scale = torch.ones_like(scale)
        return Side(q, k, forward_decay, forward_scale), Side(q_backward, k_backward, backward_decay, scale)

    def transitions(self, v: Tensor, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
        """What reads and what writes, c and b (B, L, H, N), and A (B, L, H, N, N) of each direction, in float32 at
        least."""
        *vectors, direct = (working(part) for part in inputs)
        steps, elements = direct.split([2 * self.nheads, self.direct - 2 * self.nheads], -1)
        dt_bias, A_log = (part.to(steps.dtype) for part in weights_of(self.matrix_mixer, "dt_bias", "A_log"))
        dt = F.softplus(steps.unflatten(-1, (2, -1)) + dt_bias)
        elements = elements.unflatten(-1, (2, -1, self.nheads)).mT
        turns = state_matrices(elements, "cayley", self.config.d_state)
        A = (dt.unsqueeze(-1) * -A_log.exp()).exp().unsqueeze(-1) * turns
        found = []
        for side, (B, C) in enumerate((vectors[:2], vectors[2:])):
            b = B.unsqueeze(2) * dt[..., side, :].unsqueeze(-1)
            found.append((C.unsqueeze(2).expand_as(b), b, A[:, :, side]))
        if self.swapped:
            c, b, A = found[1]
            found[1] = (b, c, F.pad(A[:, 1:].mT, (0, 0, 0, 0, 0, 0, 0, 1)))  # nothing stands behind the last one
        return tuple(found)

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        if self.full:
            forward, backward = self.transitions(v, inputs)
            below = transition_matrix(*forward)
            above = transition_matrix(*(part.flip(1) for part in backward)).flip(-1, -2)
        elif self.elementwise:
            forward, backward = self.sides(v, inputs)
            backward = backward._replace(log_decay=move_gates(backward.log_decay, int(self.swapped), None))
            below, above = side_matrices(forward, backward, shift=False)
            below, above = below.tril(-1), above.triu(1)
        else:
            return super().entries(v, inputs)
        return with_diagonal(below + above, self.diagonal(v))

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        if not self.elementwise:
            return super().mix_values(v, inputs, cu_seqlens, max_seqlen)
        diagonal = self.diagonal(v)
        if not self.full:
            sides = self.sides(v, inputs)
            # Both scans bring a token's own term c_i b_i, which is not in M.
            own = sum((working(side.q) * working(side.k)).sum(-1) * side.dt for side in sides)
            offset = int(self.swapped)
            return self.scan(v, *sides, diagonal - own, cu_seqlens, shift=False, gate_offset=offset)
        forward, backward = self.transitions(v, inputs)
        both = (torch.cat((one, other.flip(1))) for one, other in zip((v, *forward), (v, *backward), strict=True))
        below, above = transition_scan(*both).chunk(2)
        return below + above.flip(1) + diagonal.unsqueeze(-1) * v


def transition_matrix(q: Tensor, k: Tensor, A: Tensor) -> Tensor:
    """q_i^T A_i ... A_(j+1) k_j in row i and column j < i, else 0: q and k (B, L, H, N), A (B, L, H, N, N) -> (B, H, L,
    L)."""
    length = q.shape[1]
    left, rows = q.new_zeros(*q.shape[:1], *q.shape[2:], length), []  # of each k, one a column
    for t in range(length):
        left = A[:, t] @ left
        rows.append((q[:, t].unsqueeze(-2) @ left).squeeze(-2))
        left = left + F.pad(k[:, t].unsqueeze(-1), (t, length - 1 - t))
    return torch.stack(rows, 2)


@outside_autocast
def transition_scan(v: Tensor, q: Tensor, k: Tensor, A: Tensor) -> Tensor:
    """`transition_matrix` times v (B, L, H, P), in float32 at least.

    All chunks at once go token by token through what their transitions make of the state that enters and of their k.
    Then the states go from chunk to chunk.
    """
    length, N = q.shape[1:4:2]
    v, q, k, A = (in_chunks(working(part)) for part in (v, q, k, A))
    identity = torch.eye(N, N + CHUNK, dtype=A.dtype, device=A.device)
    left, rows = identity.expand(*q.shape[:2], *q.shape[3:], -1), []  # of the state and of each k, one a column
    for t in range(CHUNK):
        left = A[:, :, t] @ left
        rows.append((q[:, :, t].unsqueeze(-2) @ left).squeeze(-2))
        left = left + F.pad(k[:, :, t].unsqueeze(-1), (N + t, CHUNK - 1 - t))
    of_state, of_chunk = torch.stack(rows, 2).split([N, CHUNK], -1)
    passed, added = left.split([N, CHUNK], -1)
    added = torch.einsum("bchis,bcshp->bchip", added, v)
    states = [torch.zeros_like(added[:, 0])]
    for factor, term in zip(passed.unbind(1), added.unbind(1), strict=True):
        states.append(factor @ states[-1] + term)
    y = torch.einsum("bcths,bcshp->bcthp", of_chunk, v)
    y = y + torch.einsum("bcthi,bchip->bcthp", of_state, torch.stack(states[:-1], 1))
    return y.flatten(1, 2)[:, :length]


def in_chunks(x: Tensor) -> Tensor:
    """(B, L, ...) -> (B, chunks, CHUNK, ...), with zeros behind the end."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))
