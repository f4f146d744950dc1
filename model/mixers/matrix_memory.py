"""The MRU with addresses: a matrix that every token turns, adds to under a key and reads by a query."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from matmix.kernels import matrix_memory
from matmix.kernels.functions import outside_autocast, working
from matmix.kernels.mru.constructions import bounded_rows
from matmix.model.initialization import constant_init
from matmix.model.mixers.base import Mixer, RMSNormWeight, ShortConv, convolve, gated, zero_state
from matmix.model.mixers.mru import draw_fading, fading_rates
from matmix.model.mixers.products import ProductHeads
from matmix.model.mixers.scans.delta_rule import transition_matrix

State = tuple[Tensor, ...]
"""The last inputs of the convolution (batch, d_inner, d_conv - 1), S (batch, H, headdim, d_state), and with `products`
those (batch, products, 4, 4)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixMemoryConfig:
    """Options of the MRU with addresses."""

    headdim: int = 4
    """Channels of a head, which are turned by one matrix."""
    d_state: int = 4
    """Numbers of a key, so many of which are remembered of each channel."""
    expand: int = 2
    """Inner width over d_model."""
    d_conv: int = 4
    """Width of the causal depthwise convolution (2 to 9)."""
    products: int = 0
    """Heads beside the memory that multiply nearly orthogonal 4 x 4 matrices up, made from the token itself: what word
    problems need."""
    norm: bool = False
    """An RMSNorm in front of the gate, as in Hydra's block."""
    bias: bool = False
    """Biases in the projections of values, gates and outputs."""


class MatrixMemory(Mixer):
    """value_proj -> conv + silu -> values v of the heads, S_t = S_{t-1} A_t + v_t (rates k_t)^T, S_t q_t -> gate ->
    out_proj.

    A_t is made of the head's own values, and rows of absolute sum at most 1 bound it; keys k and queries q are those of
    all heads. It is the affine product of matrices of the MRU (`matrix_product_scan`), X_t = [[A_t, 0],
    [v_t (rates k_t)^T, I]], of which one block is read, by an address. With `products` what these heads give is added.
    """

    Config = MatrixMemoryConfig
    causal_form = True
    takes_context = True
    static_step = True
    carries = True
    rank_option = "d_state"
    not_decayed = ("turn_base", "key_rates", "products.fade_root")

    def __init__(self, d_model: int, config: MatrixMemoryConfig, *, output_std: float, **options):
        super().__init__(d_model, config, output_std=output_std, **options)
        self.d_inner = config.expand * d_model
        self.nheads, order = self.d_inner // config.headdim, config.d_state
        self.value_proj = nn.Linear(d_model, self.d_inner, bias=config.bias)
        self.gate_proj = nn.Linear(d_model, self.d_inner, bias=config.bias)
        self.conv1d = ShortConv(self.d_inner, config.d_conv, True)
        self.key_proj, self.query_proj = (nn.Linear(self.d_inner, order, bias=False) for _ in range(2))
        self.key_rates = nn.Parameter(torch.empty(self.nheads, order))
        self.turn_up = nn.Parameter(torch.empty(self.nheads, config.headdim, order**2))
        self.turn_base = nn.Parameter(torch.empty(self.nheads, order**2))
        self.skip = nn.Parameter(torch.empty(self.d_inner))
        self.norm = RMSNormWeight(self.d_inner) if config.norm else None
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=config.bias)
        self.products = ProductHeads(d_model, config.products, output_std) if config.products else None
        self.init_rules |= {
            # So that S holds about as much as one value, however slowly it fades.
            "key_rates": draw_rates,
            "turn_up": constant_init(0.0),
            "turn_base": partial(draw_fading, k=order),
            "skip": constant_init(1.0),
        }

    @classmethod
    def check(cls, d_model: int, config: MatrixMemoryConfig) -> None:
        super().check(d_model, config)
        cls.require(1 <= config.d_state <= 32, config, "d_state", "must be from 1 to 32")
        cls.require(2 <= config.d_conv <= 9, config, "d_conv", "must be from 2 to 9")
        cls.require_least(config, products=0)
        cls.require_inner_width(d_model, config)

    @classmethod
    def convolution_alone(cls, config: MatrixMemoryConfig) -> dict[str, Any]:
        return {"expand": config.expand, "project": True, "norm": config.norm}

    @classmethod
    def mixing_flops(cls, d_model: int, config: MatrixMemoryConfig, seqlen: int, causal: bool) -> float:
        """A is made, turns the state, which is added to and read."""
        order = config.d_state
        memory = 2.0 * config.expand * d_model * (2 * order**2 + 3 * order)
        return memory + ProductHeads.mixing_flops(config.products)

    def blocks(self) -> dict[str, tuple[int, ...]]:
        # Every few rows make a matrix of their own: as one linear map they mean nothing.
        return {} if self.products is None else {"products.in_proj.weight": ()}

    def source(
        self, x: Tensor, window: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What values, keys, queries and A are made of, (..., d_inner), from x (..., d_model); and the window behind x,
        as `convolve` has it."""
        options = {"causal": True, "activation": "silu", "cu_seqlens": cu_seqlens, "context": self.context}
        return convolve(self.conv1d, self.value_proj(x), window, **options)

    def heads(self, source: Tensor) -> Tensor:
        """(..., d_inner) -> (..., H, headdim)"""
        return source.unflatten(-1, (self.nheads, -1))

    @outside_autocast
    def elements(self, values: Tensor) -> Tensor:
        """Elements (..., H, d_state^2) of A, as `matrix_memory` takes them, from values (..., H, headdim). In float32
        at least: bfloat16 would round slow fading to none."""
        made = torch.einsum("...hp,hpe->...he", working(values), working(self.turn_up))
        return made + working(self.turn_base)

    def remember(self, source: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """`matrix_memory` of what `source` gives, (B, L, d_inner)."""
        values = self.heads(source)
        keys, queries = self.key_proj(source), self.query_proj(source)
        return matrix_memory(
            values, self.elements(values), keys, queries, self.key_rates, context=self.context, **options
        )

    def finish(self, y: Tensor, source: Tensor, x: Tensor) -> Tensor:
        """Skip, gate, norm and output projection of what was read, (..., H, headdim)."""
        y = torch.addcmul(y.flatten(-2).to(source.dtype), source, self.skip.to(source.dtype))
        return self.out_proj(gated(y, self.gate_proj(x), self.norm))

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        source, _ = self.source(x, cu_seqlens=cu_seqlens)
        y = self.finish(self.remember(source, cu_seqlens=cu_seqlens), source, x)
        return y if self.products is None else y + self.products(x, cu_seqlens=cu_seqlens, context=self.context)[0]

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> State:
        """Zeros; products begin at the identity."""
        window = zero_state(self.conv1d, device, batch_size, self.d_inner, self.config.d_conv - 1)
        memory = self.nheads, self.config.headdim, self.config.d_state
        state = window, zero_state(self.conv1d, device, batch_size, *memory, exact=True)
        return state if self.products is None else (*state, self.products.initial_state(batch_size, device))

    def forward_with_state(self, x: Tensor, state: State, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        source, window = self.source(x, state[0], cu_seqlens)
        y, memory = self.remember(source, initial_state=state[1], return_final_state=True, cu_seqlens=cu_seqlens)
        y = self.finish(y, source, x)
        if self.products is None:
            return y, (window, memory)
        more, products = self.products(x, initial_state=state[2], cu_seqlens=cu_seqlens, context=self.context)
        return y + more, (window, memory, products)

    # -- the definition -------------------------------------------------------------------------------------------

    def parts(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values (B, L, H, headdim), A (B, L, H, d_state, d_state), what values are written with and what S is read by
        (B, L, H, d_state), in float32 at least."""
        values = self.heads(source)
        order = self.config.d_state
        elements = self.elements(values)
        identity = torch.eye(order, dtype=elements.dtype, device=elements.device)
        turns, _ = bounded_rows(elements.unflatten(-1, (order, order)) + identity)
        keys, queries = (working(layer(source)).unsqueeze(-2) for layer in (self.key_proj, self.query_proj))
        return values, turns, keys * working(self.key_rates), queries.expand(*values.shape[:-1], -1)

    def matrix(self, x: Tensor) -> Tensor:
        """M[t, s] = (rates k_s)^T A_{s+1} ... A_t q_t for s <= t, else 0, (B, H, L, L)."""
        _, turns, keys, queries = self.parts(self.source(x)[0])
        return transition_matrix(turns.mT, keys, queries)

    def values(self, x: Tensor) -> Tensor:
        return self.heads(self.source(x)[0])

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        y = self.finish(mixed, self.source(x)[0], x)
        return y if self.products is None else y + self.products.definition(x)

    def overflow_advice(self) -> str:
        return "what it remembers is bounded, so its input was not finite already; try a lower optimizer.lr"


def draw_rates(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return fading_rates(*shape)
