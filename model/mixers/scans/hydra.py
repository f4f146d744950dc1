"""Hydra: the quasiseparable mixer (arXiv 2407.09941), bidirectional, linear in the length.

Parameters have the names and shapes of the authors' module, so that their checkpoints load by renaming only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from matmix.kernels import gated_norm, quasiseparable_scan, short_conv
from matmix.model.initialization import InitRule, constant_init, normal_init, uniform_init
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.scans.hydra_functions import StepSizes, ValuesAndVectors
from matmix.model.parameter_rules import NOT_DECAYED, ParameterRule


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraConfig:
    """Options of the Hydra mixer."""

    d_state: int = 64
    """State size N per head: the rank of the off-diagonal blocks of M."""
    headdim: int = 64
    """Channels per head."""
    expand: int = 2
    """Inner width over d_model."""
    ngroups: int = 1
    """Groups of heads that share B and C."""
    d_conv: int = 7
    """Width of the centred depthwise convolution (odd, 3 to 9)."""
    bias: bool = False
    """Biases in the input and output projections."""
    conv_bias: bool = True
    """Bias in the convolution."""
    learnable_init_states: bool = False
    """Learn the state that both scans start from."""
    dt_min: float = 0.001
    """Smallest step size at initialisation."""
    dt_max: float = 0.1
    """Largest step size at initialisation."""
    dt_init_floor: float = 1e-4
    """Initial step sizes are not below this."""
    dt_limit_low: float = 0.0
    """Step sizes are never below this."""
    dt_limit_high: float = 0.0
    """Step sizes are never above this; 0 means no limit."""
    chunk_size: int = 0
    """Chunk length of the scan; 0 lets the kernel choose. Changes speed only."""
    recompute: bool = False
    """Compute the convolution, step sizes and gated norm again in the backward pass instead of keeping them;
    about 39 % less activation memory."""


class Hydra(Mixer):
    """in_proj -> [z | x B C of both directions | dt of both] -> conv + silu -> quasiseparable scan -> gated
    norm -> out_proj."""

    Config = HydraConfig
    causal_form = False
    bidirectional_form = True
    sequence_aligned = True
    complexity = "O(L)"

    def __init__(self, d_model: int, config: HydraConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.recompute = config.recompute  # turned off where whole blocks are recomputed
        self.d_inner, self.nheads, self.d_group, conv_dim = self.widths(d_model, config)
        self.in_proj = nn.Linear(d_model, self.d_inner + conv_dim + 2 * self.nheads, bias=config.bias)
        # Holds the weights only: the convolution itself is an op that respects document boundaries.
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, config.d_conv, groups=conv_dim, bias=config.conv_bias)
        if config.learnable_init_states:
            self.init_states = nn.Parameter(torch.empty(self.nheads, config.headdim, config.d_state))
        self.dt_bias = nn.Parameter(torch.empty(self.nheads))
        self.A_log = nn.Parameter(torch.empty(self.nheads))
        self.D = nn.Parameter(torch.empty(self.nheads))
        self.fc_D = nn.Linear(self.d_inner, self.nheads, bias=False)
        self.norm = RMSNormWeight(self.d_inner)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=config.bias)
        self.init_rules = {
            "conv1d.weight": uniform_init(config.d_conv**-0.5),
            "conv1d.bias": uniform_init(config.d_conv**-0.5),
            "init_states": constant_init(0.0),
            "dt_bias": dt_bias_init(config.dt_min, config.dt_max, config.dt_init_floor),
            "A_log": constant_init(0.0),
            "D": constant_init(1.0),
            "out_proj.weight": normal_init(output_std),
        }

    def parameter_rules(self, seqlen: int) -> dict[str, ParameterRule]:
        names = ["A_log", "dt_bias", "D", *["init_states"] * self.config.learnable_init_states]
        return dict.fromkeys(names, NOT_DECAYED)

    @staticmethod
    def widths(d_model: int, config: HydraConfig) -> tuple[int, int, int, int]:
        """d_inner, nheads, width of one of B and C, and width of the convolution."""
        d_inner = config.expand * d_model
        d_group = config.ngroups * config.d_state
        return d_inner, d_inner // config.headdim, d_group, d_inner + 4 * d_group

    @classmethod
    def check(cls, d_model: int, config: HydraConfig) -> None:
        for name in ("d_state", "headdim", "expand", "ngroups"):
            if getattr(config, name) < 1:
                raise ValueError(f"model.mixers.hydra.{name} = {getattr(config, name)}: must be at least 1")
        d_inner, nheads, _, _ = cls.widths(d_model, config)
        if d_inner % config.headdim:
            raise ValueError(
                f"model.mixers.hydra.headdim = {config.headdim} does not divide the inner width "
                f"expand * d_model = {config.expand} * {d_model} = {d_inner}; change headdim, expand or "
                "d_model"
            )
        if nheads % config.ngroups:
            raise ValueError(
                f"model.mixers.hydra.ngroups = {config.ngroups} does not divide the {nheads} heads "
                "(expand * d_model / headdim); change ngroups or headdim"
            )
        if config.d_conv % 2 == 0 or not 3 <= config.d_conv <= 9:
            raise ValueError(f"model.mixers.hydra.d_conv = {config.d_conv}: must be odd and from 3 to 9")

    @classmethod
    def flops_per_token(cls, d_model: int, config: HydraConfig, seqlen: int, causal: bool) -> float:
        d_inner, nheads, _, conv_dim = cls.widths(d_model, config)
        projections = d_model * (d_inner + conv_dim + 2 * nheads) + d_inner * d_model + d_inner * nheads
        # The recurrence: per direction, state, write and read take 3 multiply-adds per state element.
        scan = 2 * 3 * d_inner * config.d_state
        return 2.0 * (projections + conv_dim * config.d_conv + scan)

    @classmethod
    def block_rank(cls, config: HydraConfig) -> int:
        return config.d_state

    @classmethod
    def halo(cls, config: HydraConfig) -> int:
        return config.d_conv // 2

    def parts(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The gate z (B, L, d_inner) and all arguments of the scan."""
        return self.scan_arguments(self.in_proj(x), cu_seqlens)

    def scan_arguments(
        self, projected: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """As `parts`, from in_proj's output."""
        config = self.config
        z, vbc, dt = projected.split([self.d_inner, self.d_inner + 4 * self.d_group, 2 * self.nheads], -1)
        vbc = short_conv(vbc, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu", cu_seqlens=cu_seqlens)
        v, k_forward, q_forward, k_backward, q_backward, diagonal = ValuesAndVectors.apply(
            vbc, self.fc_D.weight, self.D, self.d_group
        )
        high = config.dt_limit_high if config.dt_limit_high > 0 else math.inf
        # Step sizes and decays in float32: bfloat16 would round the decay of long memories to 1.
        dt, log_decay = StepSizes.apply(dt, self.dt_bias, self.A_log, config.dt_limit_low, high)
        dt_forward, dt_backward = dt.unbind(-2)
        log_decay_forward, log_decay_backward = log_decay.unbind(-2)
        groups = (config.ngroups, config.d_state)
        return z, {
            "v": v.unflatten(-1, (self.nheads, config.headdim)),
            "q_forward": q_forward.unflatten(-1, groups),
            "k_forward": k_forward.unflatten(-1, groups),
            "q_backward": q_backward.unflatten(-1, groups),
            "k_backward": k_backward.unflatten(-1, groups),
            "log_decay_forward": log_decay_forward,
            "log_decay_backward": log_decay_backward,
            "input_scale_forward": dt_forward,
            "input_scale_backward": dt_backward,
            "diagonal": diagonal,
        }

    def scan_states(self, documents: int) -> torch.Tensor | None:
        """The learned initial state (documents, H, N, P) of either scan, or None."""
        if not self.config.learnable_init_states:
            return None
        return self.init_states.transpose(1, 2).expand(documents, -1, -1, -1)

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None
    ) -> torch.Tensor:
        projected = self.in_proj(x)
        if not self.recompute or not torch.is_grad_enabled():
            return self.mix_projected(projected, cu_seqlens)
        # Nothing in it is random, and reading a generator's state would keep CUDA graphs from being captured.
        return checkpoint(
            self.mix_projected,
            projected,
            cu_seqlens,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=keep_scan_output,
        )

    def mix_projected(self, projected: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """All that follows in_proj: (B, L, width of in_proj) -> (B, L, d_model)."""
        z, arguments = self.scan_arguments(projected, cu_seqlens)
        states = self.scan_states(projected.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1)
        y = quasiseparable_scan(
            **arguments,
            shift=True,
            initial_state_forward=states,
            initial_state_backward=states,
            cu_seqlens=cu_seqlens,
            chunk_size=self.config.chunk_size or None,
        )
        return self.out_proj(gated_norm(y.flatten(-2).to(z.dtype), self.norm.weight, z, eps=self.norm.eps))

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        """M = tril_strict(G_f * L_f) + triu_strict(G_b * L_b) + diag(D), (B, H, L, L); learned initial
        states, which add a term of their own, are not part of it."""
        _, a = self.parts(x, None)
        length = x.shape[1]
        share = self.nheads // self.config.ngroups

        def one_direction(q: torch.Tensor, k: torch.Tensor, log_decay: torch.Tensor, scale: torch.Tensor):
            # Shifted: row t reads with q at t - 1 the state in which token s < t has decayed over s + 1 .. t
            # - 1.
            q, k = (part.repeat_interleave(share, dim=2) for part in (q, k))
            weights = torch.einsum("bthn,bshn->bhts", q[:, :-1], k[:, :-1] * scale[:, :-1].unsqueeze(-1))
            c = log_decay[:, :-1].cumsum(1).transpose(1, 2)
            decay = (c.unsqueeze(-1) - c.unsqueeze(-2)).tril().exp().tril()
            return F.pad(weights * decay, (0, 1, 1, 0))

        flipped = (
            a[name].flip(1) for name in ("q_backward", "k_backward", "log_decay_backward", "input_scale_backward")
        )
        below = one_direction(a["q_forward"], a["k_forward"], a["log_decay_forward"], a["input_scale_forward"])
        above = one_direction(*flipped).flip(-1, -2)
        assert below.shape[-1] == length
        return below + above + torch.diag_embed(a["diagonal"].transpose(1, 2))

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x, None)[1]["v"]

    def combine(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        z = self.parts(x, None)[0]
        return self.out_proj(gated_norm(mixed.flatten(-2), self.norm.weight, z, eps=self.norm.eps))


def save_scan_only(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Of what runs inside a checkpoint keep the scan's output: it costs most to compute again."""
    # By name: an exported model that runs without the package has no such op and computes the scan again too.
    kept = str(op) == "matmix.quasiseparable_scan.default"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_scan_output() -> Any:
    """The contexts of a checkpoint that recomputes all but the scan."""
    return create_selective_checkpoint_contexts(save_scan_only)


class RMSNormWeight(nn.Module):
    """The weight of a gated RMSNorm; the op itself is `kernels.gated_norm`."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.init_rules = {"weight": constant_init(1.0)}


def dt_bias_init(low: float, high: float, floor: float) -> InitRule:
    """softplus^-1 of step sizes drawn log-uniformly from [low, high] and floored."""

    def rule(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        dt = torch.empty(shape).uniform_(math.log(low), math.log(high), generator=generator).exp().clamp(min=floor)
        return dt + torch.log(-torch.expm1(-dt))

    return rule
