"""MRU, the matrix recurrent unit (mru-lm): H_t = H_{t-1} X_t per head, causal, O(1) memory per generated
token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from matmix.kernels import matrix_product_scan
from matmix.model.initialization import constant_init, normal_init
from matmix.model.mixers.base import Mixer
from matmix.kernels.mru.constructions import CONSTRUCTIONS, build_state_matrices, state_elements


@dataclass(frozen=True, kw_only=True, slots=True)
class MRUConfig:
    """Options of the MRU mixer."""

    order: int = 8
    """States are order x order matrices."""
    nheads: int = 0
    """Number of states; 0 means d_model / order^2, so that all states together are as wide as the model."""
    construction: Literal["identity_plus", "ldu", "cayley"] = "cayley"
    """How state matrices come from their elements: cayley is orthogonal and cannot overflow; ldu (mru-lm's
    choice) has determinant 1 and identity_plus is unconstrained: both need small learning rates."""
    bias: bool = False
    """Biases in the input and output projections."""
    dropout: float = 0.0
    """Dropout on the elements of the state matrices."""


class MRU(Mixer):
    """x W_up -> state matrices X_t -> H_t = H_{t-1} X_t -> H_t W_down[head] -> output projection.

    States are float32 (bfloat16 states lose 29 % over 1,024 steps). After a forward, `state_norm` holds the
    largest absolute element of any state: the thing to watch with a construction that does not bound it.

    What M means here: the unit has no values that are mixed. Unrolled, H_t = H_0 X_1 ... X_t is the block
    semiseparable matrix M[t, s] = X_{s+1} ... X_t (blocks of order x order, M[t, t] = I) applied to a
    sequence that is u_1 = H_0 X_1 at the first token and zero afterwards. All information passes through M,
    none through f(x).
    """

    Config = MRUConfig
    causal_form = True
    bidirectional_form = False
    sequence_aligned = True
    complexity = "O(L)"

    def __init__(self, d_model: int, config: MRUConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.order = config.order
        self.nheads = self.head_count(d_model, config)
        self.state_size = self.nheads * self.order**2
        d_chunk = d_model // (self.nheads * self.order)
        elements = self.nheads * state_elements(config.construction, config.order)
        self.in_proj = nn.Linear(d_model, elements, bias=config.bias)
        self.state_down = nn.Parameter(torch.empty(self.nheads, self.order, d_chunk))
        self.out_proj = nn.Linear(d_model, d_model, bias=config.bias)
        self.element_dropout = nn.Dropout(config.dropout)
        self.state_norm: torch.Tensor | None = None
        self.init_rules = {
            # Elements start at zero, so every H_t starts as the identity, whose flattened variance is 1 /
            # order.
            "in_proj.weight": constant_init(0.0),
            "state_down": normal_init(0.02 * self.order**0.5),
            "out_proj.weight": normal_init(output_std),
        }

    @staticmethod
    def head_count(d_model: int, config: MRUConfig) -> int:
        """The number of states per token."""
        return config.nheads or d_model // config.order**2

    @classmethod
    def check(cls, d_model: int, config: MRUConfig) -> None:
        if config.construction not in CONSTRUCTIONS:
            raise ValueError(
                f"model.mixers.mru.construction = {config.construction!r}; known: {', '.join(CONSTRUCTIONS)}"
            )
        least = 2 if config.construction == "cayley" else 1
        if not least <= config.order <= 64:
            raise ValueError(
                f"model.mixers.mru.order = {config.order}: must be from {least} to 64 with {config.construction}"
            )
        if config.nheads < 0:
            raise ValueError(f"model.mixers.mru.nheads = {config.nheads}: must be 0 (automatic) or more")
        nheads = cls.head_count(d_model, config)
        if nheads == 0 or (not config.nheads and d_model % config.order**2):
            raise ValueError(
                f"model.mixers.mru: d_model = {d_model} is not a multiple of order^2 = {config.order**2}; "
                "change order, or give nheads"
            )
        if d_model % (nheads * config.order):
            raise ValueError(
                f"model.mixers.mru: nheads * order = {nheads} * {config.order} does not divide "
                f"d_model = {d_model}; change nheads or order"
            )

    @classmethod
    def flops_per_token(cls, d_model: int, config: MRUConfig, seqlen: int, causal: bool) -> float:
        nheads, order = cls.head_count(d_model, config), config.order
        state_size = nheads * order**2
        d_chunk = d_model // (nheads * order)
        elements = nheads * state_elements(config.construction, order)
        read = min(state_size * d_model, state_size * d_chunk + d_model**2)
        # One order^3 product for the scan, about one for the construction.
        return 2.0 * (d_model * elements + 2 * nheads * order**3 + read)

    def state_matrices(self, x: torch.Tensor) -> torch.Tensor:
        """X (..., H, order, order) in float32 (float64 for float64 inputs) from x (..., d_model)."""
        elements = self.element_dropout(self.in_proj(x))
        elements = elements.to(torch.promote_types(elements.dtype, torch.float32)).unflatten(-1, (self.nheads, -1))
        with torch.autocast(elements.device.type, enabled=False):
            return build_state_matrices(elements, self.config.construction, self.order)

    def combine(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """States (..., H, order, order) -> outputs (..., d_model)."""
        states = mixed.to(x.dtype)
        if self.state_size > self.d_model:
            return self.out_proj((states @ self.state_down).flatten(-3))
        # Both maps are linear: folded into one, the tokens see a single large product instead of many tiny
        # ones.
        out = self.out_proj.weight.unflatten(1, (self.nheads, self.order, -1))
        folded = torch.einsum("hjc,dhic->dhij", self.state_down, out)
        return F.linear(states.flatten(-3), folded.flatten(1), self.out_proj.bias)

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None
    ) -> torch.Tensor:
        states = matrix_product_scan(self.state_matrices(x), cu_seqlens=cu_seqlens)
        self.watch(states)
        return self.combine(states, x)

    def watch(self, states: torch.Tensor) -> None:
        """Keep the largest absolute element of `states`; NaN and infinity show up in it."""
        self.state_norm = torch.linalg.vector_norm(states.detach(), float("inf"))

    def monitor(self) -> dict[str, torch.Tensor]:
        return {} if self.state_norm is None else {"state_norm": self.state_norm}

    def initial_state(self, batch_size: int) -> torch.Tensor:
        """The identity, (batch_size, H, order, order) float32."""
        device = self.state_down.device
        return torch.eye(self.order, device=device).expand(batch_size, self.nheads, -1, -1).contiguous()

    def forward_with_state(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Continue from a state; raises OverflowError when the states stop being finite."""
        matrices = self.state_matrices(x)
        states, final = matrix_product_scan(matrices, initial_state=state.to(matrices.dtype), return_final_state=True)
        self.watch(states)
        self.refuse_overflow()
        return self.combine(states, x), final

    def step(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        matrices = self.state_matrices(x)
        with torch.autocast(matrices.device.type, enabled=False):
            state = state.to(matrices.dtype) @ matrices
        self.watch(state)
        self.refuse_overflow()
        return self.combine(state, x), state

    def refuse_overflow(self) -> None:
        if self.state_norm is not None and not bool(self.state_norm.isfinite()):
            raise OverflowError(
                f"an MRU state left the range of float32: construction {self.config.construction!r} does "
                "not bound products of state matrices; use 'cayley', or shorter sequences"
            )

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        """M (B, H, L, L, order, order) with M[t, s] = X_{s+1} ... X_t for s <= t, else 0."""
        matrices = self.state_matrices(x).transpose(1, 2)
        batch, nheads, length, order, _ = matrices.shape
        identity = torch.eye(order, dtype=matrices.dtype, device=matrices.device)
        rows: list[torch.Tensor] = []
        for t in range(length):
            row = matrices.new_zeros(batch, nheads, length, order, order)
            if t:
                row[:, :, :t] = rows[-1][:, :, :t] @ matrices[:, :, t, None]
            row[:, :, t] = identity
            rows.append(row)
        return torch.stack(rows, dim=2)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """u (B, L, H, order, order): X_1 at the first token, zero afterwards."""
        matrices = self.state_matrices(x)
        first = torch.zeros_like(matrices)
        first[:, 0] = matrices[:, 0]
        return first

    def mix(self, matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bshki,bhtsij->bthkj", values, matrix)

    def overflow_advice(self) -> str:
        if self.config.construction in ("cayley", "householder", "qr"):  # orthogonal: only NaNs that came in do that
            return "its construction is bounded, so its input was not finite already; try a lower optimizer.lr"
        return 'use construction "cayley", which is bounded, or a lower optimizer.lr'
