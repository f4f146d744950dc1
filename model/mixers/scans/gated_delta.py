"""Gated DeltaNet (arXiv 2412.06464): a state that forgets by a gate and overwrites what a key held before. Without
the gate it is DeltaNet (arXiv 2406.06484)."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import gated_norm
from matmix.kernels.functions import working
from matmix.model.calls import weight_of
from matmix.model.mixers.base import Mixer, RMSNormWeight, ShortConv, convolve, zero_state
from matmix.model.mixers.scans.delta_rule import delta_rule_step, gated_delta_rule, transition_matrix, unit_vectors
from matmix.model.mixers.scans.scan_block import draw_dt_bias, draw_log_of_uniform


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaConfig:
    """Options of the gated delta rule."""

    headdim: int = 64
    """Channels of values per head."""
    qk_dim: int = 64
    """Channels of queries and keys per head: the rank of the blocks of M below the diagonal."""
    expand: int = 1
    """Inner width over d_model."""
    gate: bool = True
    """The state decays by a factor made from each token; without it, DeltaNet. The gate of the output stays."""
    d_conv: int = 4
    """Width of the causal depthwise convolution (2 to 9)."""
    bias: bool = False
    """Biases in the input and output projections."""
    conv_bias: bool = False
    """Bias in the convolution."""
    dt_min: float = 0.001
    """Smallest step size of the decay at initialisation."""
    dt_max: float = 0.1
    """Largest step size of the decay at initialisation."""
    chunk_size: int = 64
    """Tokens per chunk of the parallel form. Changes speed only."""


class DeltaParts(NamedTuple):
    """The inputs of the recurrence, (B, L, heads, ...) or of one token (B, heads, ...), and the gate of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor
    z: Tensor
    """(B, L, d_inner), or (B, d_inner)"""


class GatedDelta(Mixer):
    """in_proj -> [z | q k v | beta | a] -> conv + silu -> gated delta rule -> gated norm per head -> out_proj.

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and o_t = S_t q_t, with q and k of length 1,
    beta = sigmoid(b) and alpha = exp(-exp(A_log) softplus(a + dt_bias)).
    """

    Config = GatedDeltaConfig
    causal_form = True
    takes_context = True
    rank_option = "qk_dim"
    not_decayed = ("A_log", "dt_bias")
    static_step = True
    carries = True

    def __init__(self, d_model: int, config: GatedDeltaConfig, **options):
        super().__init__(d_model, config, **options)
        self.d_inner, self.nheads, conv_dim = self.widths(d_model, config)
        self.sections = [self.d_inner, conv_dim, *[self.nheads] * (1 + config.gate)]
        self.in_proj = nn.Linear(d_model, sum(self.sections), bias=config.bias)
        self.conv1d = ShortConv(conv_dim, config.d_conv, config.conv_bias)
        if config.gate:
            self.dt_bias = nn.Parameter(torch.empty(self.nheads))
            self.A_log = nn.Parameter(torch.empty(self.nheads))
        self.norm = RMSNormWeight(self.d_inner)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=config.bias)
        self.init_rules |= {
            "dt_bias": partial(draw_dt_bias, low=config.dt_min, high=config.dt_max, floor=1e-4),
            "A_log": partial(draw_log_of_uniform, low=1.0, high=16.0),
        }

    def blocks(self) -> dict[str, tuple[int, ...]]:
        keys = self.nheads * self.config.qk_dim
        return {"in_proj.weight": (self.d_inner, keys, keys, self.d_inner, *self.sections[2:])}

    @staticmethod
    def widths(d_model: int, config: GatedDeltaConfig) -> tuple[int, int, int]:
        """d_inner, nheads, and width of the convolution."""
        d_inner = config.expand * d_model
        nheads = d_inner // config.headdim
        return d_inner, nheads, d_inner + 2 * nheads * config.qk_dim

    @classmethod
    def check(cls, d_model: int, config: GatedDeltaConfig) -> None:
        cls.require_least(config, qk_dim=1, chunk_size=1)
        cls.require(2 <= config.d_conv <= 9, config, "d_conv", "must be from 2 to 9")
        cls.require_steps(config)
        cls.require_inner_width(d_model, config)

    @classmethod
    def mixing_flops(cls, d_model: int, config: GatedDeltaConfig, seqlen: int, causal: bool) -> float:
        _, nheads, _ = cls.widths(d_model, config)
        keys, values, chunk = config.qk_dim, config.headdim, min(config.chunk_size, seqlen)
        within = chunk * (3 * keys + values + (keys + values) / 2)  # scores, the triangular system, what it is read by
        return 2.0 * nheads * (within + keys * keys + 2 * keys * values + keys * keys * values / chunk)

    def parts(
        self, x: Tensor, window: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[DeltaParts, Tensor | None]:
        """All inputs of the recurrence from x (..., d_model), and the window behind x, as `convolve` has it."""
        z, qkv, b, *a = self.in_proj(x).split(self.sections, -1)
        options = {"causal": True, "activation": "silu", "cu_seqlens": cu_seqlens, "context": self.context}
        qkv, window = convolve(self.conv1d, qkv, window, **options)
        keys = self.nheads * self.config.qk_dim
        q, k, v = (part.unflatten(-1, (self.nheads, -1)) for part in qkv.split([keys, keys, self.d_inner], -1))
        # In float32, as is all that follows: bfloat16 would round the decay of long memories to 1.
        beta = torch.sigmoid(working(b))
        log_decay = torch.zeros_like(beta)
        if a:
            exact = beta.dtype
            log_decay = -self.A_log.to(exact).exp() * F.softplus(a[0].to(exact) + self.dt_bias.to(exact))
        return DeltaParts(unit_vectors(q), unit_vectors(k), v, beta, log_decay, z), window

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        (*arguments, z), _ = self.parts(x, cu_seqlens=cu_seqlens)
        options = {"cu_seqlens": cu_seqlens, "context": self.context}
        y, _ = gated_delta_rule(tuple(arguments), self.config.chunk_size, **options)
        return self.finish(y, z)

    def finish(self, y: Tensor, z: Tensor) -> Tensor:
        """Norm, gate and output projection of y (..., heads, headdim)."""
        y = y.flatten(-2).to(z.dtype)
        return self.out_proj(gated_norm(y, weight_of(self.norm), z, eps=self.norm.eps, group_size=self.config.headdim))

    def matrix(self, x: Tensor) -> Tensor:
        """M[t, s] = beta_s q_t^T A_t ... A_{s+1} k_s with A_t = alpha_t (I - beta_t k_t k_t^T), (B, H, L, L)."""
        q, k, _, beta, log_decay, _ = self.parts(x)[0]
        beta = beta.unsqueeze(-1)
        identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        erasing = identity - (beta * k).unsqueeze(-1) * k.unsqueeze(-2)
        return transition_matrix(log_decay.exp()[..., None, None] * erasing, beta * k, q)

    def values(self, x: Tensor) -> Tensor:
        return self.parts(x)[0].v

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.finish(mixed, self.parts(x)[0].z)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Zeros: the last inputs of the convolution (batch_size, its width, d_conv - 1), and the recurrence's state
        (batch_size, H, qk_dim, headdim)."""
        memory = (self.nheads, self.config.qk_dim, self.config.headdim)
        window = zero_state(self.conv1d, device, batch_size, self.sections[1], self.config.d_conv - 1)
        return window, zero_state(self.conv1d, device, batch_size, *memory, exact=True)

    def forward_with_state(
        self, x: Tensor, state: tuple[Tensor, Tensor], cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        (*arguments, z), window = self.parts(x, state[0], cu_seqlens)
        options = {"cu_seqlens": cu_seqlens, "chunk_size": self.config.chunk_size, "context": self.context}
        y, memory = gated_delta_rule(tuple(arguments), initial_state=state[1], **options)
        return self.finish(y, z), (window, memory)

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        (q, k, v, beta, log_decay, z), window = self.parts(x, state[0])
        alpha, written = log_decay.exp().unsqueeze(-1), beta.unsqueeze(-1) * k
        y, memory = delta_rule_step(state[1], alpha, k, -alpha * written, written, v.to(k.dtype), q)
        return self.finish(y, z), (window, memory)
