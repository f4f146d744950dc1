"""The layer around a state-space scan, which Hydra, the semiseparable mixer and the bidirectional ones share.

Parameters have the names and shapes of the authors' modules, so that their checkpoints load by renaming only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import gated_norm, scan_layer, short_conv
from matmix.kernels.checks import CHUNK_SIZES
from matmix.kernels.scan_layer.chunked import LayerForm, ScanArguments, norm_and_gate, scan_arguments
from matmix.model.calls import weight_of
from matmix.model.initialization import InitRule, constant_init, normal_init, uniform_init
from matmix.model.mixers.base import Mixer, RMSNormWeight, check_inner_width, check_least, conv_weights
from matmix.model.parameter_rules import NOT_DECAYED, ParameterRule


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanBlockConfig:
    """Options of every mixer with this layer."""

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


class ScanBlock(Mixer):
    """in_proj -> [z | x B C of each direction | dt of each direction] -> conv + silu -> scan -> gated norm -> out_proj.

    `scan_layer` computes all that stands between the two projections.
    """

    Config = ScanBlockConfig
    sequence_aligned = True
    rank_option = "d_state"
    complexity = "O(L)"

    directions: ClassVar[int]
    """1 or 2 scans."""
    diagonal: ClassVar[Literal["none", "constant", "projected"]]
    """The diagonal of M beside the scans: D of each head, or D plus a projection of the token's values."""
    shift: ClassVar[bool] = False
    """Each of two directions' output moves one token on, so that no token meets itself in the scans."""
    step_shape: ClassVar[tuple[int, ...]] = ()
    """The dimensions before the heads of dt_bias and A_log: (2,) where each direction has its own."""

    def __init__(self, d_model: int, config: Any, *, causal: bool, max_seqlen: int, output_std: float):
        super().__init__(d_model, config, causal=causal, max_seqlen=max_seqlen, output_std=output_std)
        self.d_inner, self.nheads, self.d_group, self.conv_dim = self.widths(d_model, config)
        width = self.d_inner + self.conv_dim + self.directions * self.nheads
        self.in_proj = nn.Linear(d_model, width, bias=config.bias)
        # Holds the weights only: the convolution itself is an op that respects document boundaries.
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, config.d_conv, groups=self.conv_dim, bias=config.conv_bias
        )
        self.add_initial_states()
        self.dt_bias = nn.Parameter(torch.empty(*self.step_shape, self.nheads))
        self.A_log = nn.Parameter(torch.empty(*self.step_shape, self.nheads))
        if self.diagonal != "none":
            self.D = nn.Parameter(torch.empty(self.nheads))
        if self.diagonal == "projected":
            self.fc_D = nn.Linear(self.d_inner, self.nheads, bias=False)
        self.norm = RMSNormWeight(self.joined_width(self.d_inner))
        self.out_proj = nn.Linear(self.joined_width(self.d_inner), d_model, bias=config.bias)
        self.init_rules = {
            "conv1d.weight": uniform_init(config.d_conv**-0.5),
            "conv1d.bias": uniform_init(config.d_conv**-0.5),
            "init_states": constant_init(0.0),
            "dt_bias": dt_bias_init(config.dt_min, config.dt_max, config.dt_init_floor),
            "A_log": constant_init(0.0),
            "D": constant_init(1.0),
            "out_proj.weight": normal_init(output_std),
        }

    def add_initial_states(self) -> None:
        """Add the parameter `init_states`, where there is one: before the others, as optimizer states in checkpoints
        follow the order of the parameters."""

    def parameter_rules(self, seqlen: int) -> dict[str, ParameterRule]:
        names = ("A_log", "dt_bias", "D", "init_states")
        return dict.fromkeys((name for name in names if hasattr(self, name)), NOT_DECAYED)

    @classmethod
    def widths(cls, d_model: int, config: Any) -> tuple[int, int, int, int]:
        """d_inner, nheads, width of one of B and C, and width of the convolution."""
        d_inner = config.expand * d_model
        d_group = config.ngroups * config.d_state
        return d_inner, d_inner // config.headdim, d_group, d_inner + 2 * cls.directions * d_group

    @classmethod
    def joined_width(cls, d_inner: int) -> int:
        """Channels once the directions have met."""
        return d_inner

    @classmethod
    def check(cls, d_model: int, config: Any) -> None:
        field = f"model.mixers.{cls.name}"
        check_least(cls.name, config, d_state=1, headdim=1, expand=1, ngroups=1)
        check_inner_width(cls.name, d_model, config)
        nheads = cls.widths(d_model, config)[1]
        if nheads % config.ngroups:
            raise ValueError(
                f"{field}.ngroups = {config.ngroups} does not divide the {nheads} heads (expand * d_model / headdim); "
                "change ngroups or headdim"
            )
        if cls.causal_form and not 2 <= config.d_conv <= 9:
            raise ValueError(f"{field}.d_conv = {config.d_conv}: must be from 2 to 9")
        if not cls.causal_form and (config.d_conv % 2 == 0 or not 3 <= config.d_conv <= 9):
            raise ValueError(f"{field}.d_conv = {config.d_conv}: must be odd and from 3 to 9")
        check_initial_steps(cls.name, config)
        if not 0 < config.dt_init_floor < math.inf:
            raise ValueError(f"{field}.dt_init_floor = {config.dt_init_floor}: must be above 0")
        if config.chunk_size not in (0, *CHUNK_SIZES):
            known = ", ".join(map(str, (0, *CHUNK_SIZES)))
            raise ValueError(f"{field}.chunk_size = {config.chunk_size}: must be one of {known}")

    @classmethod
    def flops_per_token(cls, d_model: int, config: Any, seqlen: int, causal: bool) -> float:
        d_inner, nheads, _, conv_dim = cls.widths(d_model, config)
        projections = d_model * (d_inner + conv_dim + cls.directions * nheads) + cls.joined_width(d_inner) * d_model
        if cls.diagonal == "projected":
            projections += d_inner * nheads
        # The recurrence: per direction, state, write and read take 3 multiply-adds per state element.
        scan = cls.directions * 3 * d_inner * config.d_state
        return 2.0 * (projections + conv_dim * config.d_conv + scan)

    @property
    def form(self) -> LayerForm:
        """The sizes of the layer, and where its parts stand in in_proj's output."""
        config, (low, high) = self.config, self.dt_limits
        return LayerForm(
            self.nheads, config.headdim, config.ngroups, config.d_state, self.directions, self.shift, low, high
        )

    @property
    def dt_limits(self) -> tuple[float, float]:
        """The least and the largest step size."""
        return 0.0, math.inf

    @property
    def norm_options(self) -> dict[str, Any]:
        """The options of the gated norm, by their names in `scan_layer`."""
        return {"eps": self.norm.eps}

    def layer_options(self) -> dict[str, Any]:
        """The options of `scan_layer` that are not the same for all layers."""
        return {}

    def diagonal_options(self) -> dict[str, Any]:
        """The parameters of M's diagonal, by their names in `scan_layer`."""
        if self.diagonal == "none":
            return {}
        if self.diagonal == "constant":
            return {"D": self.D}
        # An adapter or quantised layer is more than its weight.
        weight = weight_of(self.fc_D) if type(self.fc_D) is nn.Linear else self.fc_D
        return {"D": self.D, "diagonal_weight": weight}

    def mix_projected(self, projected: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """All that follows in_proj: (B, L, width of in_proj) -> (B, L, d_model)."""
        y = scan_layer(
            projected, *conv_weights(self.conv1d), self.dt_bias, self.A_log, weight_of(self.norm), nheads=self.nheads,
            ngroups=self.config.ngroups, d_state=self.config.d_state, directions=self.directions, shift=self.shift,
            dt_limits=self.dt_limits, cu_seqlens=cu_seqlens, chunk_size=self.config.chunk_size or None,
            **self.diagonal_options(), **self.norm_options, **self.layer_options(),
        )  # fmt: skip
        return self.out_proj(y)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        return self.mix_projected(self.in_proj(x), cu_seqlens)

    def arguments(self, mixed: Tensor, raw: Tensor) -> ScanArguments:
        """The arguments of the scan from the convolution's output (..., conv_dim) and the raw step sizes
        (..., directions H)."""
        return scan_arguments(self.form, mixed, raw, self.dt_bias, self.A_log, **self.diagonal_options())

    def parts(self, x: Tensor) -> tuple[Tensor, ScanArguments]:
        """The gate z (B, L, d_inner), and the arguments of the scan."""
        z, channels, raw = self.form.split(self.in_proj(x))
        mixed = short_conv(channels, *conv_weights(self.conv1d), causal=self.directions == 1, activation="silu")
        return z, self.arguments(mixed, raw)

    def values(self, x: Tensor) -> Tensor:
        return self.parts(x)[1].v

    def finish(self, y: Tensor, z: Tensor) -> Tensor:
        """Gated norm and output projection: y (..., H, P) and the gate z (..., H P) -> (..., d_model)."""
        return self.out_proj(norm_and_gate(gated_norm, y.flatten(-2), z, weight_of(self.norm), **self.norm_options))

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.finish(mixed, self.parts(x)[0])


class BidirectionalScanBlock(ScanBlock):
    """The layer with one scan from either end."""

    causal_form = False
    bidirectional_form = True
    directions = 2

    @classmethod
    def halo(cls, config: Any) -> int:
        return config.d_conv // 2

    def direction_matrices(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices (B, H, L, L) of the two scans, before any shift: on and below, and on and above the diagonal."""
        first, second = self.parts(x)[1].sides
        below = semiseparable_matrix(first.q, first.k, first.log_decay, first.input_scale)
        flipped = (part.flip(1) for part in (second.q, second.k, second.log_decay, second.input_scale))
        return below, semiseparable_matrix(*flipped).flip(-1, -2)

    def matrix(self, x: Tensor) -> Tensor:
        below, above = self.direction_matrices(x)
        if self.shift:
            # Row t becomes what row t - 1 (t + 1) was.
            below = F.pad(below[:, :, :-1], (0, 0, 1, 0))
            above = F.pad(above[:, :, 1:], (0, 0, 0, 1))
        matrix = below + above
        diagonal = self.parts(x)[1].diagonal
        return matrix if diagonal is None else matrix + torch.diag_embed(diagonal.transpose(1, 2))


def dt_bias_init(low: float, high: float, floor: float) -> InitRule:
    """softplus^-1 of step sizes drawn log-uniformly from [low, high] and floored."""
    return partial(draw_dt_bias, low=low, high=high, floor=floor)


def draw_dt_bias(shape: torch.Size, generator: torch.Generator, *, low: float, high: float, floor: float) -> Tensor:
    """The rule of `dt_bias_init`."""
    dt = torch.empty(shape).uniform_(math.log(low), math.log(high), generator=generator).exp().clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))


def log_of_uniform_init(low: float, high: float) -> InitRule:
    """Logarithms of values drawn uniformly from [low, high]."""
    return partial(draw_log_of_uniform, low=low, high=high)


def draw_log_of_uniform(shape: torch.Size, generator: torch.Generator, *, low: float, high: float) -> Tensor:
    """The rule of `log_of_uniform_init`."""
    return torch.empty(shape).uniform_(low, high, generator=generator).log()


def check_initial_steps(name: str, config: Any) -> None:
    """ValueError (one line) where dt_min and dt_max of the mixer `name` are no range of step sizes to draw from."""
    if not 0 < config.dt_min <= config.dt_max < math.inf:
        raise ValueError(
            f"model.mixers.{name}.dt_min = {config.dt_min}: must be above 0 and at most dt_max = {config.dt_max}"
        )


def semiseparable_matrix(q: Tensor, k: Tensor, log_decay: Tensor, input_scale: Tensor) -> Tensor:
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
