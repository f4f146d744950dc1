"""The semiseparable mixer of Mamba-2 (state space duality, arXiv 2405.21060): causal, linear in the length.

Parameters have the names and shapes of mamba_ssm's Mamba2 module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from matmix.kernels import gated_norm, semiseparable_scan, short_conv
from matmix.kernels.checks import CHUNK_SIZES
from matmix.model.initialization import InitRule, constant_init, normal_init, uniform_init
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.scans.hydra import RMSNormWeight, dt_bias_init
from matmix.model.parameter_rules import NOT_DECAYED, ParameterRule


@dataclass(frozen=True, kw_only=True, slots=True)
class SemiseparableConfig:
    """Options of the semiseparable mixer."""

    d_state: int = 64
    """State size N per head: the rank of the blocks of M below the diagonal."""
    headdim: int = 64
    """Channels per head."""
    expand: int = 2
    """Inner width over d_model."""
    ngroups: int = 1
    """Groups of heads that share B and C, and of channels that the norm takes together."""
    d_conv: int = 4
    """Width of the causal depthwise convolution (2 to 9)."""
    bias: bool = False
    """Biases in the input and output projections."""
    conv_bias: bool = True
    """Bias in the convolution."""
    norm_before_gate: bool = False
    """Normalise before the gate, as Hydra does, not after it as Mamba-2."""
    dt_min: float = 0.001
    """Smallest step size at initialisation."""
    dt_max: float = 0.1
    """Largest step size at initialisation."""
    dt_init_floor: float = 1e-4
    """Initial step sizes are not below this."""
    chunk_size: int = 0
    """Chunk length of the scan; 0 lets the kernel choose. Changes speed only."""


class Semiseparable(Mixer):
    """in_proj -> [z | x B C | dt] -> causal conv + silu -> semiseparable scan with skip D -> gate and norm -> out_proj.

    M[t, s] = C_t . B_s dt_s exp(sum of dt A over s + 1 .. t) for s <= t, plus D on the diagonal.
    """

    Config = SemiseparableConfig
    causal_form = True
    bidirectional_form = False
    sequence_aligned = True
    complexity = "O(L)"

    def __init__(self, d_model: int, config: SemiseparableConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.d_inner, self.nheads, self.d_group, self.conv_dim = self.widths(d_model, config)
        self.in_proj = nn.Linear(d_model, self.d_inner + self.conv_dim + self.nheads, bias=config.bias)
        # Holds the weights only: the convolution itself is an op that respects document boundaries.
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, config.d_conv, groups=self.conv_dim, bias=config.conv_bias
        )
        self.dt_bias = nn.Parameter(torch.empty(self.nheads))
        self.A_log = nn.Parameter(torch.empty(self.nheads))
        self.D = nn.Parameter(torch.empty(self.nheads))
        self.norm = RMSNormWeight(self.d_inner)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=config.bias)
        self.init_rules = {
            "conv1d.weight": uniform_init(config.d_conv**-0.5),
            "conv1d.bias": uniform_init(config.d_conv**-0.5),
            "dt_bias": dt_bias_init(config.dt_min, config.dt_max, config.dt_init_floor),
            "A_log": log_rate_init(1.0, 16.0),
            "D": constant_init(1.0),
            "out_proj.weight": normal_init(output_std),
        }

    def parameter_rules(self, seqlen: int) -> dict[str, ParameterRule]:
        return dict.fromkeys(["A_log", "dt_bias", "D"], NOT_DECAYED)

    @staticmethod
    def widths(d_model: int, config: SemiseparableConfig) -> tuple[int, int, int, int]:
        """d_inner, nheads, width of one of B and C, and width of the convolution."""
        d_inner = config.expand * d_model
        d_group = config.ngroups * config.d_state
        return d_inner, d_inner // config.headdim, d_group, d_inner + 2 * d_group

    @classmethod
    def check(cls, d_model: int, config: SemiseparableConfig) -> None:
        check_scan_options(cls.name, d_model, config)
        if not 2 <= config.d_conv <= 9:
            raise ValueError(f"model.mixers.{cls.name}.d_conv = {config.d_conv}: must be from 2 to 9")

    @classmethod
    def flops_per_token(cls, d_model: int, config: SemiseparableConfig, seqlen: int, causal: bool) -> float:
        d_inner, nheads, _, conv_dim = cls.widths(d_model, config)
        projections = d_model * (d_inner + conv_dim + nheads) + d_inner * d_model
        # The recurrence: state, write and read take 3 multiply-adds per state element.
        return 2.0 * (projections + conv_dim * config.d_conv + 3 * d_inner * config.d_state)

    @classmethod
    def block_rank(cls, config: SemiseparableConfig) -> int:
        return config.d_state

    def parts(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, tail: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """The gate z (B, L, d_inner), all arguments of the scan, and the conv's inputs (B, L, conv_dim), which with
        `tail`, those of the d_conv - 1 tokens before, begin with it."""
        z, vbc, dt = self.in_proj(x).split([self.d_inner, self.conv_dim, self.nheads], -1)
        if tail is not None:
            vbc = torch.cat([tail.to(vbc.dtype), vbc], 1)
        mixed = short_conv(
            vbc,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            causal=True,
            activation="silu",
            cu_seqlens=cu_seqlens,
        )
        mixed = mixed[:, -x.shape[1] :]
        v, k, q = mixed.split([self.d_inner, self.d_group, self.d_group], -1)
        # Step sizes and decays in float32: bfloat16 would round the decay of long memories to 1.
        exact = torch.promote_types(dt.dtype, torch.float32)
        dt = F.softplus(dt.to(exact) + self.dt_bias.to(exact))
        groups = (self.config.ngroups, self.config.d_state)
        arguments = {
            "v": v.unflatten(-1, (self.nheads, self.config.headdim)),
            "q": q.unflatten(-1, groups),
            "k": k.unflatten(-1, groups),
            "log_decay": dt * -self.A_log.to(exact).exp(),
            "input_scale": dt,
            "diagonal": self.D,
        }
        return z, arguments, vbc

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Gate, norm and output projection: y (B, L, d_inner) and z alike -> (B, L, d_model)."""
        groups = self.config.ngroups
        if self.config.norm_before_gate:
            y = gated_norm(y, self.norm.weight, z, eps=self.norm.eps, group_size=self.d_inner // groups)
        else:
            exact = torch.promote_types(y.dtype, torch.float32)
            gated = (y.to(exact) * F.silu(z.to(exact))).unflatten(-1, (groups, -1))
            scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.norm.eps)
            y = ((gated * scale).flatten(-2) * self.norm.weight).to(y.dtype)
        return self.out_proj(y)

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None
    ) -> torch.Tensor:
        z, arguments, _ = self.parts(x, cu_seqlens)
        y = semiseparable_scan(**arguments, cu_seqlens=cu_seqlens, chunk_size=self.config.chunk_size or None)
        return self.finish(y.flatten(-2), z)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros: the last inputs of the convolution (batch_size, d_conv - 1, conv_dim), and the state (batch_size, H,
        N, P), float32 at least."""
        weight, config = self.in_proj.weight, self.config
        exact = torch.promote_types(weight.dtype, torch.float32)
        return (
            weight.new_zeros(batch_size, config.d_conv - 1, self.conv_dim),
            weight.new_zeros(batch_size, self.nheads, config.d_state, config.headdim, dtype=exact),
        )

    def forward_with_state(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        z, arguments, seen = self.parts(x, tail=state[0])
        y, last = semiseparable_scan(
            **arguments, initial_state=state[1], return_final_state=True, chunk_size=self.config.chunk_size or None
        )
        # A copy, or else the last few rows would keep all of a long prompt in memory.
        return self.finish(y.flatten(-2), z), (seen[:, x.shape[1] :].clone(), last)

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        _, a, _ = self.parts(x)
        below = semiseparable_matrix(a["q"], a["k"], a["log_decay"], a["input_scale"])
        return below + torch.diag_embed(self.D.unsqueeze(-1).expand(-1, x.shape[1]))

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x)[1]["v"]

    def combine(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.finish(mixed.flatten(-2), self.parts(x)[0])


def semiseparable_matrix(
    q: torch.Tensor, k: torch.Tensor, log_decay: torch.Tensor, input_scale: torch.Tensor
) -> torch.Tensor:
    """M[t, s] = q_t . k_s input_scale_s exp(sum of log_decay over s + 1 .. t) for s <= t, else 0.

    q, k (B, L, ngroups, N); log_decay, input_scale (B, L, H). Returns (B, H, L, L).
    """
    length, heads = log_decay.shape[1:]
    q, k = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (q, k))
    weights = torch.einsum("bthn,bshn->bhts", q, k * input_scale.unsqueeze(-1))
    # Column s sums the decays of the rows below s, from nothing at row s.
    below = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-1)
    steps = log_decay.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, length)
    return (weights * steps.masked_fill(~below, 0.0).cumsum(-2).exp()).tril()


def check_scan_options(name: str, d_model: int, config: Any) -> None:
    """ValueError when widths, heads, groups, initial step sizes or the chunk length of a scan do not fit."""
    field = f"model.mixers.{name}"
    for option in ("d_state", "headdim", "expand", "ngroups"):
        if getattr(config, option) < 1:
            raise ValueError(f"{field}.{option} = {getattr(config, option)}: must be at least 1")
    d_inner = config.expand * d_model
    if d_inner % config.headdim:
        raise ValueError(
            f"{field}.headdim = {config.headdim} does not divide the inner width expand * d_model = {config.expand} * "
            f"{d_model} = {d_inner}; change headdim, expand or d_model"
        )
    if d_inner // config.headdim % config.ngroups:
        raise ValueError(
            f"{field}.ngroups = {config.ngroups} does not divide the {d_inner // config.headdim} heads (expand * "
            "d_model / headdim); change ngroups or headdim"
        )
    if not 0 < config.dt_min <= config.dt_max or config.dt_init_floor <= 0:
        raise ValueError(
            f"{field}.dt_min = {config.dt_min} with dt_max = {config.dt_max} and dt_init_floor = "
            f"{config.dt_init_floor}: all must be positive, and dt_min not above dt_max"
        )
    if config.chunk_size not in (0, *CHUNK_SIZES):
        known = ", ".join(map(str, (0, *CHUNK_SIZES)))
        raise ValueError(f"{field}.chunk_size = {config.chunk_size}: must be one of {known}")


def log_rate_init(low: float, high: float) -> InitRule:
    """Logarithms of rates drawn uniformly from [low, high]."""

    def rule(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        return torch.empty(shape).uniform_(low, high, generator=generator).log()

    return rule
