"""The semiseparable mixer of Mamba-2 (state space duality, arXiv 2405.21060): causal, linear in the length.

Parameters have the names and shapes of mamba_ssm's Mamba2 module.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from matmix.model.mixers.base import scan_on, zero_state
from matmix.model.mixers.scans.scan_block import ScanBlock, ScanBlockConfig, draw_log_of_uniform, semiseparable_matrix


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
    static_step = True
    takes_in_place = True
    carries = True
    directions = 1
    diagonal = "constant"

    def __init__(self, d_model: int, config: SemiseparableConfig, **options):
        super().__init__(d_model, config, **options)
        self.init_rules["A_log"] = partial(draw_log_of_uniform, low=1.0, high=16.0)

    @property
    def norm_options(self) -> dict[str, Any]:
        group_size = self.form.inner // self.form.groups
        return {"eps": self.norm.eps, "group_size": group_size, "norm_first": self.config.norm_before_gate}

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Zeros: the last inputs of the convolution (batch_size, conv_dim, d_conv - 1), and the state (batch_size, H,
        N, P), float32 at least."""
        form = self.form
        window = zero_state(self.conv1d, device, batch_size, form.conv_width, self.config.d_conv - 1)
        return window, zero_state(self.conv1d, device, batch_size, form.heads, form.d_state, form.headdim, exact=True)

    def forward_with_state(
        self, x: Tensor, state: tuple[Tensor, Tensor], cu_seqlens: Tensor | None = None, in_place: bool = False
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        z, (v, (side,), diagonal), window = self.parts(x, state[0], in_place, cu_seqlens)
        y, memory = scan_on(
            v, side.q, side.k, side.log_decay, input_scale=side.input_scale, diagonal=diagonal,
            initial_state=state[1], in_place=in_place, chunk_size=self.config.chunk_size or None, cu_seqlens=cu_seqlens,
            context=self.context,
        )  # fmt: skip
        return self.finish(y, z), (window, memory)

    step = forward_with_state

    def matrix(self, x: Tensor) -> Tensor:
        (side,) = self.parts(x)[1].sides
        below = semiseparable_matrix(side.q, side.k, side.log_decay, side.input_scale)
        return below + torch.diag_embed(self.D.unsqueeze(-1).expand(-1, x.shape[1]))
