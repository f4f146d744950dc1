"""The semiseparable mixer of Mamba-2 (state space duality, arXiv 2405.21060): causal, linear in the length.

Parameters have the names and shapes of mamba_ssm's Mamba2 module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from matmix.kernels import semiseparable_scan, semiseparable_step, short_conv, short_conv_step
from matmix.model.mixers.base import conv_weights, state_like
from matmix.model.mixers.scans.scan_block import (
    ScanBlock,
    ScanBlockConfig,
    log_of_uniform_init,
    semiseparable_matrix,
)


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
    takes_in_place = True
    directions = 1
    diagonal = "constant"

    def __init__(self, d_model: int, config: SemiseparableConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.init_rules["A_log"] = log_of_uniform_init(1.0, 16.0)

    @property
    def norm_options(self) -> dict[str, Any]:
        config, eps = self.config, self.norm.eps
        return {"eps": eps, "group_size": self.d_inner // config.ngroups, "norm_first": config.norm_before_gate}

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Zeros: the last inputs of the convolution (batch_size, conv_dim, d_conv - 1), and the state (batch_size, H,
        N, P), float32 at least."""
        like, config = state_like(self.conv1d, device), self.config
        exact = torch.promote_types(like.dtype, torch.float32)
        return (
            like.new_zeros(batch_size, self.conv_dim, config.d_conv - 1),
            like.new_zeros(batch_size, self.nheads, config.d_state, config.headdim, dtype=exact),
        )

    def forward_with_state(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        z, channels, raw = self.form.split(self.in_proj(x))
        weight, bias = conv_weights(self.conv1d)
        carried = {"initial_state": state[0], "return_final_state": True}
        mixed, window = short_conv(channels, weight, bias, causal=True, activation="silu", **carried)
        v, (side,), diagonal = self.arguments(mixed, raw)
        y, last = semiseparable_scan(
            v, side.q, side.k, side.log_decay, input_scale=side.input_scale, diagonal=diagonal,
            initial_state=state[1], return_final_state=True, chunk_size=self.config.chunk_size or None,
        )  # fmt: skip
        return self.finish(y, z), (window, last)

    def step(
        self, x: Tensor, state: tuple[Tensor, Tensor], in_place: bool = False
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        z, channels, raw = self.form.split(self.in_proj(x))
        weight, bias = conv_weights(self.conv1d)
        mixed, window = short_conv_step(channels, state[0], weight, bias, activation="silu", in_place=in_place)
        v, (side,), diagonal = self.arguments(mixed, raw)
        y, last = semiseparable_step(
            v, side.q, side.k, side.log_decay, state[1], input_scale=side.input_scale, diagonal=diagonal,
            in_place=in_place,
        )  # fmt: skip
        return self.finish(y, z), (window, last)

    def matrix(self, x: Tensor) -> Tensor:
        (side,) = self.parts(x)[1].sides
        below = semiseparable_matrix(side.q, side.k, side.log_decay, side.input_scale)
        return below + torch.diag_embed(self.D.unsqueeze(-1).expand(-1, x.shape[1]))
