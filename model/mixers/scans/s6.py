"""S6, the selective state space model of Mamba-1 (arXiv 2312.00752, algorithm 2): every channel has its own step size
at every token and N decays of its own.

Parameters have the names and shapes of mamba_ssm's Mamba module.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import s6_scan, s6_scan_is_fused
from matmix.kernels.context import Context, within_part
from matmix.kernels.documents import chunk_layout
from matmix.kernels.functions import outside_autocast, working
from matmix.kernels.matrix_product.parts import Part
from matmix.model.initialization import constant_init, uniform_init
from matmix.model.mixers.base import (
    ExactLinear,
    Mixer,
    ShortConv,
    convolve,
    exact_linear,
    gate_sums,
    recomputed,
    zero_state,
)
from matmix.model.mixers.scans.delta_rule import ChunkMaps, run_chunks
from matmix.model.mixers.scans.scan_block import draw_dt_bias


@dataclass(frozen=True, kw_only=True, slots=True)
class S6Config:
    """Options of S6."""

    d_state: int = 16
    """State size N per channel: the rank of the blocks of M below the diagonal."""
    expand: int = 2
    """Inner width over d_model."""
    d_conv: int = 4
    """Width of the causal depthwise convolution (2 to 9)."""
    dt_rank: int = 0
    """Rank of the map from a token to its step sizes; 0 means d_model / 16, rounded up."""
    bias: bool = False
    """Biases in the input and output projections."""
    conv_bias: bool = True
    """Bias in the convolution."""
    dt_min: float = 0.001
    """Smallest step size at initialisation."""
    dt_max: float = 0.1
    """Largest step size at initialisation."""
    dt_init_floor: float = 1e-4
    """Initial step sizes are not below this."""
    chunk_size: int = 32
    """Tokens per chunk of the parallel form. Changes speed only."""


class SelectiveParts(NamedTuple):
    """The inputs of the recurrence, (B, L, ...) or of one token (B, ...), and the gate of its output."""

    x: Tensor
    """(B, L, d_inner)"""
    dt: Tensor
    """(B, L, d_inner), float32 at least."""
    b: Tensor
    """(B, L, N)"""
    c: Tensor
    """(B, L, N)"""
    z: Tensor
    """(B, L, d_inner)"""


class S6(Mixer):
    """in_proj -> [x | z] -> causal conv + silu of x -> [dt | B | C] of x -> selective scan with skip D -> silu(z) ->
    out_proj.

    For channel d, M[t, s] = sum_n C_tn B_sn dt_sd exp(A_dn sum of dt_d over s + 1 .. t) for s <= t, plus D_d on the
    diagonal, with dt = softplus(W_dt x_low + b_dt) and A = -exp(A_log).
    """

    Config = S6Config
    causal_form = True
    takes_context = True
    rank_option = "d_state"
    not_decayed = ("A_log", "D")
    not_float8 = ("dt_proj",)
    static_step = True
    carries = True

    def __init__(self, d_model: int, config: S6Config, **options):
        super().__init__(d_model, config, **options)
        self.d_inner = self.nheads = inner = config.expand * d_model
        rank = config.dt_rank or math.ceil(d_model / 16)
        self.sections = [rank, config.d_state, config.d_state]
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=config.bias)
        self.conv1d = ShortConv(inner, config.d_conv, config.conv_bias)
        self.x_proj = nn.Linear(inner, sum(self.sections), bias=False)
        self.dt_proj = ExactLinear(rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, config.d_state))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, d_model, bias=config.bias)
        self.init_rules |= {
            "dt_proj.weight": uniform_init(rank**-0.5),
            "dt_proj.bias": partial(draw_dt_bias, low=config.dt_min, high=config.dt_max, floor=config.dt_init_floor),
            "A_log": log_of_counts,
            "D": constant_init(1.0),
        }

    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj.weight": (self.d_inner, self.d_inner), "x_proj.weight": tuple(self.sections)}

    @classmethod
    def check(cls, d_model: int, config: S6Config) -> None:
        cls.require_least(config, d_state=1, expand=1, dt_rank=0, chunk_size=1)
        cls.require(2 <= config.d_conv <= 9, config, "d_conv", "must be from 2 to 9")
        cls.require_steps(config)
        cls.require(0 < config.dt_init_floor < math.inf, config, "dt_init_floor", "must be above 0")

    @classmethod
    def mixing_flops(cls, d_model: int, config: S6Config, seqlen: int, causal: bool) -> float:
        # State, write and read, and what is read of the state before the chunk.
        return 2.0 * config.expand * d_model * config.d_state * (4 + config.d_state / min(config.chunk_size, seqlen))

    def parts(
        self, x: Tensor, window: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[SelectiveParts, Tensor | None]:
        """All inputs of the recurrence from x (..., d_model), and the window behind x, as `convolve` has it."""
        x, z = self.in_proj(x).chunk(2, -1)
        options = {"causal": True, "activation": "silu", "cu_seqlens": cu_seqlens, "context": self.context}
        x, window = convolve(self.conv1d, x, window, **options)
        low, b, c = self.x_proj(x).split(self.sections, -1)
        # In float32, as is all that follows: bfloat16 would round the decay of long memories to 1.
        return SelectiveParts(x, F.softplus(exact_linear(low, self.dt_proj)), b, c, z), window

    def scan(self, parts: SelectiveParts, **options) -> tuple[Tensor, Tensor | None]:
        """Outputs of the layer (B, L, d_model), and the last state."""
        options |= {"chunk_size": self.config.chunk_size, "context": self.context}
        y, memory = selective_scan((*parts[:4], decay_rates(self.A_log)), **options)
        return self.finish(y, parts), memory

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        parts, _ = self.parts(x, cu_seqlens=cu_seqlens)
        return self.scan(parts, cu_seqlens=cu_seqlens)[0]

    def finish(self, y: Tensor, parts: SelectiveParts) -> Tensor:
        """Skip, gate and output projection of the scan's y (..., d_inner)."""
        y = y + working(parts.x) * self.D
        return self.out_proj(y.to(parts.z.dtype) * F.silu(parts.z))

    def matrix(self, x: Tensor) -> Tensor:
        """(B, d_inner, L, L): every channel is a head."""
        _, dt, b, c, _ = self.parts(x)[0]
        before, speeds = gate_sums(-dt, x.shape[1]), -decay_rates(self.A_log)
        below = torch.zeros_like(before)
        for n in range(self.config.d_state):
            pairs = working(c)[:, :, None, n] * working(b)[:, None, :, n]
            below = below + pairs.unsqueeze(1) * (before * speeds[:, n, None, None]).exp()
        return (below * dt.mT.unsqueeze(2)).tril() + torch.diag_embed(self.D.unsqueeze(-1).expand(-1, x.shape[1]))

    def values(self, x: Tensor) -> Tensor:
        return self.parts(x)[0].x.unsqueeze(-1)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.out_proj(mixed.flatten(-2) * F.silu(self.parts(x)[0].z))

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Zeros: the last inputs of the convolution (batch_size, d_inner, d_conv - 1), and the recurrence's state
        (batch_size, d_inner, N, 1), float32 at least."""
        window = zero_state(self.conv1d, device, batch_size, self.d_inner, self.config.d_conv - 1)
        return window, zero_state(self.conv1d, device, batch_size, self.d_inner, self.config.d_state, 1, exact=True)

    def forward_with_state(
        self, x: Tensor, state: tuple[Tensor, Tensor], cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        parts, window = self.parts(x, state[0], cu_seqlens)
        y, memory = self.scan(parts, initial_state=state[1], cu_seqlens=cu_seqlens)
        return y, (window, memory)

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        parts, window = self.parts(x, state[0])
        y, memory = selective_step(state[1].squeeze(-1), *parts[:4], decay_rates(self.A_log))
        return self.finish(y, parts), (window, memory.unsqueeze(-1))


def decay_rates(log_rates: Tensor) -> Tensor:
    """A = -exp(A_log), in float32 at least."""
    return -working(log_rates).exp()


def log_of_counts(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """log 1 .. log N in each row: the rates of S4D-Real."""
    return torch.arange(1, shape[-1] + 1).float().log().expand(shape).clone()


@outside_autocast
def selective_scan(
    inputs: tuple[Tensor, ...], chunk_size: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    context: Context | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = h_t . C_t for every channel (arXiv 2312.00752, section 3.2).

    inputs: x, dt (B, L, channels), B, C (B, L, N), A (channels, N). All else is as in `gated_delta_rule`, with a head
    of one value for each channel: states are (B or documents, channels, N, 1), y (B, L, channels), float32 at least.
    Whole rows on a GPU go through Triton kernels (`s6_scan`).
    """
    *tokens, rates = inputs
    batch, length = tokens[0].shape[:2]
    if length == 0:
        return working(tokens[0]), initial_state
    if context is None and s6_scan_is_fused(tokens[0], rates.shape[1]):
        state = None if initial_state is None else initial_state.squeeze(-1)
        y, state = s6_scan(*tokens, rates, state, cu_seqlens)
        return y, state.unsqueeze(-1)
    part = Part.of(context, cu_seqlens, tokens[0])
    bounds = cu_seqlens if part is None else within_part(cu_seqlens, length)
    layout = chunk_layout(batch, length, min(chunk_size, length), bounds, aligned=True)
    # Recomputed, as the states of all tokens are N times as large as the inputs.
    maps = recomputed(chunk_maps, *(layout.split(working(each)) for each in tokens), rates)
    y, state = run_chunks(ChunkMaps(*maps), layout, initial_state, part)
    return y.squeeze(-1), state


def chunk_maps(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rates: Tensor) -> tuple[Tensor, ...]:
    """The `ChunkMaps` of M chunks, whose tokens are gone through one by one, in all chunks at once: x, dt (M, C,
    channels), b, c (M, C, N)."""
    state, outputs = x.new_zeros(len(x), *rates.shape), []
    for tokens in zip(x.unbind(1), dt.unbind(1), b.unbind(1), c.unbind(1), strict=True):
        y, state = selective_step(state, *tokens, rates)
        outputs.append(y)
    kept = (dt.cumsum(1).unsqueeze(-1) * rates).exp()
    reads = (kept * c.unsqueeze(2)).transpose(1, 2)
    return reads, torch.stack(outputs, 2).unsqueeze(-1), torch.diag_embed(kept[:, -1]), state.unsqueeze(-1)


@outside_autocast
def selective_step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the recurrence: state (B, channels, N); x, dt (B, channels), b, c (B, N). Returns y (B, channels)
    and the new state."""
    written = (dt * x).unsqueeze(-1) * working(b).unsqueeze(1)
    state = (dt.unsqueeze(-1) * rates).exp() * state + written
    return (state @ working(c).unsqueeze(-1)).squeeze(-1), state
