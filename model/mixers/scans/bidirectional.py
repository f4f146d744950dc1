"""Bidirectional mixers from two causal ones: what Hydra is compared with (arXiv 2407.09941, section 4).

All of them are Hydra's layer but for how the two directions meet, and for A_log and dt_bias, of which each direction
has its own. With SS one semiseparable scan:

- bidirectional_add: SS_f(x) + flip SS_b(flip x). A token meets itself in both scans, so that the diagonal of M is
  c_f . b_f dt_f + c_b . b_b dt_b: it follows from what the rest of M is made of.
- bidirectional_mult: the product SS_f(x) * flip SS_b(flip x), channel by channel.
- bidirectional_concat: both, twice the channels, before the norm and the output projection.
- bidirectional_add_diagonal: add, plus a diagonal of its own, D_t = (W_D x)_t + d.
- bidirectional_add_shift: both scans shifted one token on in their own sense and then added: the diagonal is 0.

Hydra is shift and diagonal together. Only bidirectional_add_diagonal has a skip: Mamba's D x_t would be a diagonal
beside the scans, and whether M has one is what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from matmix.kernels import gated_norm, quasiseparable_scan, short_conv
from matmix.model.initialization import constant_init, normal_init, uniform_init
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.scans.hydra import RMSNormWeight, dt_bias_init
from matmix.model.mixers.scans.semiseparable import check_scan_options, semiseparable_matrix
from matmix.model.parameter_rules import NOT_DECAYED, ParameterRule


@dataclass(frozen=True, kw_only=True, slots=True)
class BidirectionalConfig:
    """Options of the mixers that join two causal scans."""

    d_state: int = 64
    """State size N per head and direction: the rank of the off-diagonal blocks of M."""
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
    dt_min: float = 0.001
    """Smallest step size at initialisation."""
    dt_max: float = 0.1
    """Largest step size at initialisation."""
    dt_init_floor: float = 1e-4
    """Initial step sizes are not below this."""
    chunk_size: int = 0
    """Chunk length of the scan; 0 lets the kernel choose. Changes speed only."""


class BidirectionalAdd(Mixer):
    """in_proj -> [z | x B C of both directions | dt of both] -> conv + silu -> two scans, joined -> gated norm ->
    out_proj."""

    Config = BidirectionalConfig
    causal_form = False
    bidirectional_form = True
    sequence_aligned = True
    complexity = "O(L)"

    joined: ClassVar[str] = "add"
    """How the directions meet: "add", "mult" or "concat"."""
    shift: ClassVar[bool] = False
    """Each direction's output moves one token on."""
    own_diagonal: ClassVar[bool] = False
    """M has a diagonal of its own."""

    def __init__(self, d_model: int, config: BidirectionalConfig, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.d_inner, self.nheads, self.d_group, self.conv_dim = self.widths(d_model, config)
        self.in_proj = nn.Linear(d_model, self.d_inner + self.conv_dim + 2 * self.nheads, bias=config.bias)
        # Holds the weights only: the convolution itself is an op that respects document boundaries.
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, config.d_conv, groups=self.conv_dim, bias=config.conv_bias
        )
        self.dt_bias = nn.Parameter(torch.empty(2, self.nheads))
        self.A_log = nn.Parameter(torch.empty(2, self.nheads))
        if self.own_diagonal:
            self.D = nn.Parameter(torch.empty(self.nheads))
            self.fc_D = nn.Linear(self.d_inner, self.nheads, bias=False)
        self.norm = RMSNormWeight(self.joined_width(self.d_inner))
        self.out_proj = nn.Linear(self.joined_width(self.d_inner), d_model, bias=config.bias)
        self.init_rules = {
            "conv1d.weight": uniform_init(config.d_conv**-0.5),
            "conv1d.bias": uniform_init(config.d_conv**-0.5),
            "dt_bias": dt_bias_init(config.dt_min, config.dt_max, config.dt_init_floor),
            "A_log": constant_init(0.0),
            "D": constant_init(1.0),
            "out_proj.weight": normal_init(output_std),
        }

    def parameter_rules(self, seqlen: int) -> dict[str, ParameterRule]:
        return dict.fromkeys(["A_log", "dt_bias", *["D"] * self.own_diagonal], NOT_DECAYED)

    @staticmethod
    def widths(d_model: int, config: BidirectionalConfig) -> tuple[int, int, int, int]:
        """d_inner, nheads, width of one of B and C, and width of the convolution."""
        d_inner = config.expand * d_model
        d_group = config.ngroups * config.d_state
        return d_inner, d_inner // config.headdim, d_group, d_inner + 4 * d_group

    @classmethod
    def joined_width(cls, d_inner: int) -> int:
        """Channels once the directions have met."""
        return 2 * d_inner if cls.joined == "concat" else d_inner

    @classmethod
    def check(cls, d_model: int, config: BidirectionalConfig) -> None:
        check_scan_options(cls.name, d_model, config)
        if config.d_conv % 2 == 0 or not 3 <= config.d_conv <= 9:
            raise ValueError(f"model.mixers.{cls.name}.d_conv = {config.d_conv}: must be odd and from 3 to 9")

    @classmethod
    def flops_per_token(cls, d_model: int, config: BidirectionalConfig, seqlen: int, causal: bool) -> float:
        d_inner, nheads, _, conv_dim = cls.widths(d_model, config)
        projections = d_model * (d_inner + conv_dim + 2 * nheads) + cls.joined_width(d_inner) * d_model
        if cls.own_diagonal:
            projections += d_inner * nheads
        # The recurrence: per direction, state, write and read take 3 multiply-adds per state element.
        scan = 2 * 3 * d_inner * config.d_state
        return 2.0 * (projections + conv_dim * config.d_conv + scan)

    @classmethod
    def block_rank(cls, config: BidirectionalConfig) -> int:
        return config.d_state

    @classmethod
    def halo(cls, config: BidirectionalConfig) -> int:
        return config.d_conv // 2

    def parts(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        """The gate z (B, L, d_inner) and the tensors of the scan."""
        config = self.config
        z, vbc, dt = self.in_proj(x).split([self.d_inner, self.conv_dim, 2 * self.nheads], -1)
        vbc = short_conv(vbc, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu", cu_seqlens=cu_seqlens)
        v, *vectors = vbc.split([self.d_inner, *4 * [self.d_group]], -1)
        k_forward, q_forward, k_backward, q_backward = (
            part.unflatten(-1, (config.ngroups, config.d_state)) for part in vectors
        )
        # Step sizes and decays in float32: bfloat16 would round the decay of long memories to 1.
        exact = torch.promote_types(dt.dtype, torch.float32)
        dt = F.softplus(dt.to(exact).unflatten(-1, (2, self.nheads)) + self.dt_bias.to(exact))
        dt_forward, dt_backward = dt.unbind(-2)
        log_decay_forward, log_decay_backward = (dt * -self.A_log.to(exact).exp()).unbind(-2)
        diagonal = self.fc_D(v).to(exact) + self.D.to(exact) if self.own_diagonal else None
        return z, {
            "v": v.unflatten(-1, (self.nheads, config.headdim)),
            "q_forward": q_forward,
            "k_forward": k_forward,
            "q_backward": q_backward,
            "k_backward": k_backward,
            "log_decay_forward": log_decay_forward,
            "log_decay_backward": log_decay_backward,
            "input_scale_forward": dt_forward,
            "input_scale_backward": dt_backward,
            "diagonal": diagonal,
        }

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None
    ) -> torch.Tensor:
        z, arguments = self.parts(x, cu_seqlens)
        y = quasiseparable_scan(
            **arguments,
            shift=self.shift,
            combine=self.joined,
            cu_seqlens=cu_seqlens,
            chunk_size=self.config.chunk_size or None,
        )
        return self.finish(y, z)

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Gated norm and output projection of y (B, L, H, P)."""
        return self.out_proj(gated_norm(y.flatten(-2), self.norm.weight, z, eps=self.norm.eps))

    def direction_matrices(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices (B, H, L, L) of the two scans: on and below, and on and above the diagonal."""
        _, a = self.parts(x)
        below = semiseparable_matrix(a["q_forward"], a["k_forward"], a["log_decay_forward"], a["input_scale_forward"])
        flipped = (
            a[name].flip(1) for name in ("q_backward", "k_backward", "log_decay_backward", "input_scale_backward")
        )
        return below, semiseparable_matrix(*flipped).flip(-1, -2)

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        below, above = self.direction_matrices(x)
        if self.shift:
            # Row t becomes what row t - 1 (t + 1) was.
            below = F.pad(below[:, :, :-1], (0, 0, 1, 0))
            above = F.pad(above[:, :, 1:], (0, 0, 0, 1))
        matrix = below + above
        if self.own_diagonal:
            matrix = matrix + torch.diag_embed(self.parts(x)[1]["diagonal"].transpose(1, 2))
        return matrix

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x)[1]["v"]

    def combine(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.finish(mixed, self.parts(x)[0])


class BidirectionalAddDiagonal(BidirectionalAdd):
    """The sum of both scans and a free diagonal."""

    own_diagonal = True


class BidirectionalAddShift(BidirectionalAdd):
    """The sum of both scans, each shifted by one token; no diagonal."""

    shift = True


class BidirectionalMult(BidirectionalAdd):
    """The product of both scans: quadratic in the values, so that there is a matrix for each direction.

    At the start the products of default sizes (7e-5) lie below the root of the norm's epsilon (3e-3), and the layer's
    outputs are small. The products grow with up to the eighth power of the inputs, and the norm squares them in
    float32: from 1e19 on, which inputs of 1e4 to 1e5 reach, outputs are 0 and then NaN. Give it normalised inputs.
    """

    joined = "mult"

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 2 H, L, L): those of the forward heads, then those of the backward heads."""
        return torch.cat(self.direction_matrices(x), dim=1)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, 2 H, P): the same for both directions."""
        return super().values(x).repeat(1, 1, 2, 1)

    def mix(self, matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        forward, backward = super().mix(matrix, values).chunk(2, dim=2)
        return forward * backward


class BidirectionalConcat(BidirectionalAdd):
    """Both scans side by side; the gate z is that of both halves."""

    joined = "concat"

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 2 H, L, L): those of the forward heads, then those of the backward heads."""
        return torch.cat(self.direction_matrices(x), dim=1)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, 2 H, P): the same for both directions."""
        return super().values(x).repeat(1, 1, 2, 1)

    def mix(self, matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """As the scan gives it, (B, L, H, 2 P): in each head the forward half, then the backward half."""
        return torch.cat(super().mix(matrix, values).chunk(2, dim=2), dim=-1)

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        gate = z.unflatten(-1, (self.nheads, -1)).repeat(1, 1, 1, 2)
        return super().finish(y, gate.flatten(-2))
