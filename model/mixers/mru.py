"""MRU, the matrix recurrent unit (mru-lm): H_t = H_{t-1} X_t per head, causal, O(1) memory per generated
token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from matmix.kernels import matrix_product_scan, mru_mixer, mru_mixer_is_fused, mru_step
from matmix.kernels.matrix_product.spans import ORDERS
from matmix.kernels.mru.chunked import state_matrices
from matmix.kernels.mru.chunks import elements_from_chunks
from matmix.kernels.mru.constructions import (
    BOUNDED_CONSTRUCTIONS,
    CONSTRUCTIONS,
    construction_products,
    state_elements,
)
from matmix.kernels.mru.norms import log_norms, scan_log_norms, summary
from matmix.kernels.precision import working
from matmix.model.initialization import constant_init, normal_init
from matmix.model.mixers.base import Mixer


@dataclass(frozen=True, kw_only=True, slots=True)
class MRUConfig:
    """Options of the MRU mixer."""

    order: int = 8
    """States are order x order matrices, order from 1 to 32; 4, 8, 16 and 32 waste nothing."""
    nheads: int = 0
    """Number of states; 0 means d_model / order^2, so that all states together are as wide as the model."""
    construction: Literal["identity_plus", "ldu", "cayley", "householder", "qr", "ldu_newton_schulz"] = "cayley"
    """How state matrices come from their elements. cayley and householder are orthogonal and ldu_newton_schulz has norm
    at most 1: their states cannot overflow. ldu (mru-lm's choice) and qr have determinant 1 and identity_plus is
    unconstrained: their states can, at higher learning rates or in longer documents."""
    input: Literal["dense", "chunked"] = "dense"
    """How elements come from a token. dense: a full projection. chunked: mru-lm's first form, in which row i of a
    head's M is a chunk of d_model / (nheads order) numbers of the token times a small matrix of the head; d_model
    weights in all. Constructions that take a triangle take that of (M - M^T) / sqrt(2)."""
    element_scale: float = 0.0
    """The elements are multiplied by this; 0 = automatic: 1 for dense, 0.08 nheads for chunked, where the factor stands
    in for a learning rate of its own (muP)."""
    output_scale: float = 0.0
    """What is read from the states is multiplied by this; 0 = automatic: 1 for dense, d_model / order for chunked,
    whose initial read-out is smaller by this."""
    decay: bool = False
    """Multiply every state matrix of a head by a learned number from (0, 1], about 1 at first: log-norms fall by a
    constant per token, which can hold the growth of an unbounded construction. It scales old and new alike, as the
    state is one product, so that nothing is forgotten faster; with a bounded construction states only shrink."""
    bias: bool = False
    """Biases in the dense input projection and in the output projection."""
    dropout: float = 0.0
    """Dropout on the elements of the state matrices."""


class MRU(Mixer):
    """Elements of x -> state matrices X_t -> H_t = H_{t-1} X_t -> H_t W_down[head] -> output projection.

    States are float32 (bfloat16 states lose 29 % over 1,024 steps). After a forward, `monitor` gives the largest
    and the mean log-norm of the states: the thing to watch with a construction that does not bound them.

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
    # Layer norms square what comes from the states: what follows is NaN before states are infinite.
    monitor_limits: ClassVar[dict[str, float]] = {"log_norm_max": math.log(torch.finfo(torch.float32).max) / 2}

    def __init__(self, d_model: int, config: MRUConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.order = config.order
        self.nheads = self.head_count(d_model, config)
        self.state_size = self.nheads * self.order**2
        d_chunk = d_model // (self.nheads * self.order)
        self.element_scale, self.output_scale = config.element_scale or 1.0, config.output_scale or 1.0
        if config.input == "dense":
            elements = self.nheads * state_elements(config.construction, config.order)
            self.in_proj = nn.Linear(d_model, elements, bias=config.bias)
        else:
            # 0.08 (1 / order) (d_model / d_chunk), as mru-lm writes it.
            self.element_scale = config.element_scale or 0.08 * self.nheads
            self.output_scale = config.output_scale or d_model / self.order
            self.state_up = nn.Parameter(torch.empty(self.nheads, d_chunk, self.order))
        fan_in = self.order if config.input == "dense" else self.state_size
        self.state_down = nn.Parameter(torch.empty(self.nheads, self.order, d_chunk))
        self.out_proj = nn.Linear(d_model, d_model, bias=config.bias)
        self.element_dropout = nn.Dropout(config.dropout)
        # The square root of 1 / decay - 1: any value gives a decay in (0, 1].
        self.decay_root = nn.Parameter(torch.empty(self.nheads)) if config.decay else None
        self.log_norms: torch.Tensor | None = None
        self.init_rules = {
            # Elements start at zero, so every H_t starts as the identity, whose flattened variance is 1 /
            # order.
            "in_proj.weight": constant_init(0.0),
            "state_up": constant_init(0.0),
            "state_down": normal_init(0.02 * fan_in**0.5 / self.output_scale),
            "out_proj.weight": normal_init(output_std),
            # A decay of 0.9999: 1 itself would have no gradient.
            "decay_root": constant_init(0.01),
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
        if config.input not in ("dense", "chunked"):
            raise ValueError(f"model.mixers.mru.input = {config.input!r}; known: dense, chunked")
        for name in ("element_scale", "output_scale"):
            if not 0 <= getattr(config, name) < math.inf:
                raise ValueError(f"model.mixers.mru.{name} = {getattr(config, name)}: must be 0 (automatic) or more")
        least = 1 if state_elements(config.construction, 1) else 2
        if not least <= config.order <= ORDERS[-1]:
            raise ValueError(
                f"model.mixers.mru.order = {config.order}: must be from {least} to {ORDERS[-1]} "
                f"with {config.construction}"
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
        inputs = d_model * nheads * state_elements(config.construction, order)
        if config.input == "chunked":
            inputs = state_size * d_chunk
        read = min(state_size * d_model, state_size * d_chunk + d_model**2)
        products = 1 + construction_products(config.construction)
        return 2.0 * (inputs + products * nheads * order**3 + read)

    def inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From x (..., d_model): elements of the state matrices (..., H, E) and None; or, in the chunked form and where
        no dropout comes between, the chunks (..., H, order, d_chunk) and their weights (H, d_chunk, order)."""
        if self.config.input == "dense":
            elements = self.in_proj(x).unflatten(-1, (self.nheads, -1))
            if self.element_scale != 1:
                elements = elements * self.element_scale
        else:
            chunks = x.unflatten(-1, (self.nheads, self.order, -1))
            w_up = working(self.state_up) * self.element_scale
            if not (self.training and self.config.dropout):
                return chunks, w_up
            elements = self.from_chunks(chunks, w_up)
        return self.element_dropout(elements), None

    def from_chunks(self, chunks: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
        """Elements (..., H, E), typed like the chunks."""
        return elements_from_chunks(chunks, w_up, self.config.construction).to(chunks.dtype)

    def elements(self, x: torch.Tensor) -> torch.Tensor:
        """Elements of the state matrices (..., H, E) from x (..., d_model)."""
        inputs, w_up = self.inputs(x)
        return inputs if w_up is None else self.from_chunks(inputs, w_up)

    def read_out(self) -> torch.Tensor:
        """W_down (H, order, d_chunk) as states are multiplied by it."""
        return self.state_down if self.output_scale == 1 else self.state_down * self.output_scale

    def build(self, elements: torch.Tensor) -> torch.Tensor:
        """X (..., H, order, order) in float32 (float64 for float64) from elements (..., H, E)."""
        matrices = state_matrices(elements, self.config.construction, self.order)
        if self.decay_root is not None:
            matrices = matrices / (1 + self.decay_root.to(matrices.dtype).square())[:, None, None]
        return matrices

    def state_matrices(self, x: torch.Tensor) -> torch.Tensor:
        """X (..., H, order, order) from x (..., d_model)."""
        return self.build(self.elements(x))

    def mixed(
        self,
        elements: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        initial_state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All states (B, L, H, order, order) and the last ones (B or documents, H, order, order) from elements
        (B, L, H, E), which the norms are taken of on the way."""
        matrices = self.build(elements)
        if initial_state is not None:
            initial_state = pad_order(initial_state.to(matrices.dtype))
        states, final = matrix_product_scan(
            pad_order(matrices), initial_state=initial_state, return_final_state=True, cu_seqlens=cu_seqlens
        )
        states, final = (h[..., : self.order, : self.order] for h in (states, final))
        self.log_norms = scan_log_norms(states, final)
        return states, final

    def combine(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """States (..., H, order, order) -> outputs (..., d_model)."""
        states = mixed.to(x.dtype)
        if self.state_size > self.d_model:
            return self.out_proj((states @ self.read_out()).flatten(-3))
        # Both maps are linear: folded into one, the tokens see a single large product instead of many tiny
        # ones.
        out = self.out_proj.weight.unflatten(1, (self.nheads, self.order, -1))
        folded = torch.einsum("hjc,dhic->dhij", self.read_out(), out)
        return F.linear(states.flatten(-3), folded.flatten(1), self.out_proj.bias)

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None
    ) -> torch.Tensor:
        return self.run(x, cu_seqlens)[0]

    def run(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs (B, L, d_model) and the last states, by the fused op or its parts; takes note of the norms."""
        inputs, w_up = self.inputs(x)
        if self.is_fused(inputs, w_up):
            y, final, self.log_norms = mru_mixer(
                inputs,
                self.read_out(),
                w_up=w_up,
                construction=self.config.construction,
                initial_state=state,
                return_final_state=True,
                return_log_norms=True,
                cu_seqlens=cu_seqlens,
            )
            return self.out_proj(y.flatten(-3)), final
        elements = inputs if w_up is None else self.from_chunks(inputs, w_up)
        states, final = self.mixed(elements, cu_seqlens, state)
        return self.combine(states, x), final

    def is_fused(self, inputs: torch.Tensor, w_up: torch.Tensor | None) -> bool:
        """Whether kernels take `inputs` to outputs without states in memory. On the CPU the parts are faster, as
        `combine` folds two projections into one."""
        construction = self.config.construction
        return self.decay_root is None and mru_mixer_is_fused(inputs, self.state_down, construction, w_up)

    def monitor(self) -> dict[str, torch.Tensor]:
        """Largest and mean log-norm of the states of the last forward; infinite or NaN after an overflow."""
        if self.log_norms is None:
            return {}
        return {"log_norm_max": self.log_norms[0], "log_norm_mean": self.log_norms[1]}

    def initial_state(self, batch_size: int) -> torch.Tensor:
        """The identity, (batch_size, H, order, order) float32."""
        device = self.state_down.device
        return torch.eye(self.order, device=device).expand(batch_size, self.nheads, -1, -1).contiguous()

    def forward_with_state(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Continue from a state; raises OverflowError when the states stop being finite."""
        y, final = self.run(x, state=state)
        self.refuse_overflow()
        return y, final

    def step(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, w_up = self.inputs(x)
        if self.is_fused(inputs, w_up):
            y, state = mru_step(inputs, state, self.read_out(), w_up=w_up, construction=self.config.construction)
            y = self.out_proj(y.flatten(-3))
        else:
            matrices = self.build(inputs if w_up is None else self.from_chunks(inputs, w_up))
            with torch.autocast(matrices.device.type, enabled=False):
                state = state.to(matrices.dtype) @ matrices
            y = self.combine(state, x)
        self.log_norms = summary(log_norms(state))
        self.refuse_overflow()
        return y, state

    def refuse_overflow(self) -> None:
        """Raise OverflowError when a state of the last forward is so large that norms of it overflow, or NaN."""
        if self.log_norms is None or bool(self.log_norms[0] < math.log(torch.finfo(self.log_norms.dtype).max) / 2):
            return
        if self.config.construction in BOUNDED_CONSTRUCTIONS:
            reason = "is bounded, so that its input was not finite already"
        else:
            reason = "does not bound products of state matrices; use 'cayley', or shorter sequences"
        raise OverflowError(
            f"an MRU state or its square left the range of float32 (log-norm {float(self.log_norms[0]):.4g}): "
            f"construction {self.config.construction!r} {reason}"
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
        if self.config.construction in BOUNDED_CONSTRUCTIONS:  # only NaNs that came in do that
            return "its construction is bounded, so its input was not finite already; try a lower optimizer.lr"
        return 'use construction "cayley", which is bounded, or a lower optimizer.lr'


def pad_order(matrices: torch.Tensor) -> torch.Tensor:
    """(..., o, o) -> (..., p, p), p the next order that the scan takes: an identity block behind, which products keep
    apart."""
    order = matrices.shape[-1]
    extra = next(taken for taken in ORDERS if taken >= order) - order
    if not extra:
        return matrices
    padded = F.pad(matrices, (0, extra, 0, extra))
    padded.diagonal(dim1=-2, dim2=-1)[..., order:] = 1
    return padded
