"""The semiseparable mixer of Mamba-2 (state space duality, arXiv 2405.21060): causal, linear in the length.

Parameters have the names and shapes of mamba_ssm's Mamba2 module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from matmix.kernels import gated_norm, semiseparable_scan, semiseparable_step, short_conv, short_conv_step
from matmix.model.calls import weight_of
from matmix.model.mixers.scans.scan_block import (
    ScanBlock,
    ScanBlockConfig,
    log_of_uniform_init,
    semiseparable_matrix,
)
from matmix.model.mixers.shared import conv_weights, state_like


@dataclass(frozen=True, kw_only=True, slots=True)
class SemiseparableConfig(ScanBlockConfig):
    """Options of the semiseparable mixer."""

    ngroups: int = 1
    """Groups of heads that share B and C, and of channels that the norm takes together."""
    d_conv: int = 4
    """Width of the causal depthwise convolution (2 to 9)."""
    norm_before_gate: bool = False
    """Normalise before the gate, as Hydra does, not after it as Mamba-2."""


class Semiseparable(ScanBlock):
    """in_proj -> [z | x B C | dt] -> causal conv + silu -> semiseparable scan with skip D -> gate and norm -> out_proj.

    M[t, s] = C_t . B_s dt_s exp(sum of dt A over s + 1 .. t) for s <= t, plus D on the diagonal.
    """

    Config = SemiseparableConfig
    causal_form = True
    bidirectional_form = False
    static_step = True
    directions = 1
    diagonal = "constant"

    def __init__(self, d_model: int, config: SemiseparableConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.init_rules["A_log"] = log_of_uniform_init(1.0, 16.0)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gate z (..., d_inner), the conv's inputs (..., conv_dim) and the raw step sizes (..., H)."""
        return self.split(self.in_proj(x))

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `project`, from in_proj's output."""
        z, vbc, dt = projected.split([self.d_inner, self.conv_dim, self.nheads], -1)
        return z, vbc, dt

    def parts(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The gate z (B, L, d_inner), and all arguments of the scan by name."""
        return self.scan_arguments(self.in_proj(x), cu_seqlens)

    def scan_arguments(
        self, projected: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """As `parts`, from in_proj's output."""
        z, vbc, dt = self.split(projected)
        weight, bias = conv_weights(self.conv1d)
        mixed = short_conv(vbc, weight, bias, causal=True, activation="silu", cu_seqlens=cu_seqlens)
        return z, self.arguments(mixed, dt)

    def arguments(self, mixed: torch.Tensor, dt: torch.Tensor) -> dict[str, torch.Tensor]:
        """All arguments of the scan from the conv's outputs (..., conv_dim) and the raw step sizes (..., H)."""
        v, k, q = mixed.split([self.d_inner, self.d_group, self.d_group], -1)
        # Step sizes and decays in float32: bfloat16 would round the decay of long memories to 1.
        exact = torch.promote_types(dt.dtype, torch.float32)
        dt = F.softplus(dt.to(exact) + self.dt_bias.to(exact))
        groups = (self.config.ngroups, self.config.d_state)
        return {
            "v": v.unflatten(-1, (self.nheads, self.config.headdim)),
            "q": q.unflatten(-1, groups),
            "k": k.unflatten(-1, groups),
            "log_decay": dt * -self.A_log.to(exact).exp(),
            "input_scale": dt,
            "diagonal": self.D,
        }

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Gate, norm and output projection: y (..., d_inner) and z alike -> (..., d_model)."""
        groups = self.config.ngroups
        if self.config.norm_before_gate:
            y = gated_norm(y, weight_of(self.norm), z, eps=self.norm.eps, group_size=self.d_inner // groups)
        else:
            exact = torch.promote_types(y.dtype, torch.float32)
            gated = (y.to(exact) * F.silu(z.to(exact))).unflatten(-1, (groups, -1))
            scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.norm.eps)
            y = ((gated * scale).flatten(-2) * weight_of(self.norm)).to(y.dtype)
        return self.out_proj(y)

    def layer_options(self) -> dict[str, Any]:
        config = self.config
        return {"norm_first": config.norm_before_gate, "group_size": self.d_inner // config.ngroups}

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None
    ) -> torch.Tensor:
        projected = self.in_proj(x)
        if self.is_fused(projected):
            return self.out_proj(self.fused(projected, cu_seqlens))
        z, arguments = self.scan_arguments(projected, cu_seqlens)
        y = semiseparable_scan(**arguments, cu_seqlens=cu_seqlens, chunk_size=self.config.chunk_size or None)
        return self.finish(y.flatten(-2), z)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros: the last inputs of the convolution (batch_size, conv_dim, d_conv - 1), and the state (batch_size, H,
        N, P), float32 at least."""
        like, config = state_like(self.conv1d, device), self.config
        exact = torch.promote_types(like.dtype, torch.float32)
        return (
            like.new_zeros(batch_size, self.conv_dim, config.d_conv - 1),
            like.new_zeros(batch_size, self.nheads, config.d_state, config.headdim, dtype=exact),
        )

    def forward_with_state(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        z, vbc, dt = self.project(x)
        weight, bias = conv_weights(self.conv1d)
        carried = {"initial_state": state[0], "return_final_state": True}
        mixed, window = short_conv(vbc, weight, bias, causal=True, activation="silu", **carried)
        carried |= {"initial_state": state[1], "chunk_size": self.config.chunk_size or None}
        y, last = semiseparable_scan(**self.arguments(mixed, dt), **carried)
        return self.finish(y.flatten(-2), z), (window, last)

    def step(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor], in_place: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        z, vbc, dt = self.project(x)
        weight, bias = conv_weights(self.conv1d)
        mixed, window = short_conv_step(vbc, state[0], weight, bias, activation="silu", in_place=in_place)
        y, last = semiseparable_step(**self.arguments(mixed, dt), state=state[1], in_place=in_place)
        return self.finish(y.flatten(-2), z), (window, last)

    def step_in_place(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.step(x, state, in_place=True)[0]

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        _, a = self.parts(x)
        below = semiseparable_matrix(a["q"], a["k"], a["log_decay"], a["input_scale"])
        return below + torch.diag_embed(self.D.unsqueeze(-1).expand(-1, x.shape[1]))

    def combine(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.finish(mixed.flatten(-2), self.parts(x)[0])
