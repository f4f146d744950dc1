"""The layer around a state-space scan, which Hydra, the semiseparable mixer and the bidirectional ones share.

Parameters have the names and shapes of the authors' modules, so that their checkpoints load by renaming only.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.kernels import gated_norm, scan_layer
from matmix.kernels.checks import CHUNK_SIZES
from matmix.kernels.functions import working
from matmix.kernels.scan_layer.chunked import LayerForm, ScanArguments, norm_and_gate, scan_arguments
from matmix.model.calls import weight_of
from matmix.model.initialization import constant_init
from matmix.model.mixers.base import Mixer, RMSNormWeight, ShortConv, conv_weights, convolve


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
    rank_option = "d_state"
    takes_context = True
    not_float8 = ("fc_D",)
    not_decayed = ("A_log", "dt_bias", "D", "init_states")

    directions: ClassVar[int]
    """1 or 2 scans."""
    joined: ClassVar[str] = "add"
    """The way in which two directions meet: "add", "mult" or "concat"."""
    diagonal: ClassVar[Literal["none", "constant", "projected"]]
    """The diagonal of M beside the scans: D of each head, or D plus a projection of the token's values."""
    shift: ClassVar[bool] = False
    """Each of two directions' output moves one token on, so that no token meets itself in the scans."""
    step_shape: ClassVar[tuple[int, ...]] = ()
    """The dimensions before the heads of dt_bias and A_log: (2,) where each direction has its own."""

    def __init__(self, d_model: int, config: Any, **options):
        super().__init__(d_model, config, **options)
        self.form = form = self.layer_form(d_model, config)
        self.nheads = form.heads
        self.in_proj = nn.Linear(d_model, sum(form.widths), bias=config.bias)
        self.conv1d = ShortConv(form.conv_width, config.d_conv, config.conv_bias)
        # Before the others, as optimizer states in checkpoints follow the order of the parameters.
        if getattr(config, "learnable_init_states", False):
            self.init_states = nn.Parameter(torch.empty(form.heads, form.headdim, form.d_state))
        self.dt_bias = nn.Parameter(torch.empty(*self.step_shape, form.heads))
        self.A_log = nn.Parameter(torch.empty(*self.step_shape, form.heads))
        if self.diagonal != "none":
            self.D = nn.Parameter(torch.empty(form.heads))
        if self.diagonal == "projected":
            self.fc_D = nn.Linear(form.inner, form.heads, bias=False)
        joined_width = form.inner * (2 if self.joined == "concat" else 1)
        self.norm = RMSNormWeight(joined_width)
        self.out_proj = nn.Linear(joined_width, d_model, bias=config.bias)
        self.init_rules |= {
            "init_states": constant_init(0.0),
            "dt_bias": partial(draw_dt_bias, low=config.dt_min, high=config.dt_max, floor=config.dt_init_floor),
            "A_log": constant_init(0.0),
            "D": constant_init(1.0),
        }

    def blocks(self) -> dict[str, tuple[int, ...]]:
        form = self.form
        vectors, steps = 2 * form.directions * (form.group_width,), form.directions * (form.heads,)
        return {"in_proj.weight": (form.inner, form.inner, *vectors, *steps)}

    @classmethod
    def layer_form(cls, d_model: int, config: Any) -> LayerForm:
        """The sizes of the layer, and where its parts stand in in_proj's output."""
        heads = config.expand * d_model // config.headdim
        sizes = (heads, config.headdim, config.ngroups, config.d_state)
        return LayerForm(*sizes, cls.directions, cls.shift, *cls.dt_limits(config))

    @classmethod
    def dt_limits(cls, config: Any) -> tuple[float, float]:
        """The least and the largest step size."""
        return 0.0, math.inf

    @classmethod
    def check(cls, d_model: int, config: Any) -> None:
        cls.require_least(config, d_state=1, ngroups=1)
        cls.require_inner_width(d_model, config)
        heads = cls.layer_form(d_model, config).heads
        if heads % config.ngroups:
            raise ValueError(
                f"model.mixers.{cls.name}.ngroups = {config.ngroups} does not divide the {heads} heads (expand * "
                "d_model / headdim); change ngroups or headdim"
            )
        if cls.causal_form:
            cls.require(2 <= config.d_conv <= 9, config, "d_conv", "must be from 2 to 9")
        else:
            cls.require(config.d_conv in range(3, 10, 2), config, "d_conv", "must be odd and from 3 to 9")
        cls.require_steps(config)
        cls.require(0 < config.dt_init_floor < math.inf, config, "dt_init_floor", "must be above 0")
        sizes = (0, *CHUNK_SIZES)
        cls.require(config.chunk_size in sizes, config, "chunk_size", f"must be one of {', '.join(map(str, sizes))}")

    @classmethod
    def mixing_flops(cls, d_model: int, config: Any, seqlen: int, causal: bool) -> float:
        # The recurrence: per direction, state, write and read take 3 multiply-adds per state element.
        return 2.0 * cls.directions * 3 * config.expand * d_model * config.d_state

    @property
    def norm_options(self) -> dict[str, Any]:
        """The options of the gated norm, by their names in `scan_layer`."""
        return {"eps": self.norm.eps}

    @property
    def layer_options(self) -> dict[str, Any]:
        """The options of `scan_layer` that are not the same for all layers."""
        return {}

    def diagonal_options(self) -> dict[str, Any]:
        """The parameters of M's diagonal, by their names in `scan_layer`."""
        weight = None
        if self.diagonal == "projected":
            # An adapter or quantised layer is more than its weight.
            weight = weight_of(self.fc_D) if type(self.fc_D) is nn.Linear else self.fc_D
        return {"D": None if self.diagonal == "none" else self.D, "diagonal_weight": weight}

    def mix_projected(self, projected: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """All that follows in_proj: (B, L, width of in_proj) -> (B, L, d_model)."""
        form = self.form
        y = scan_layer(
            projected, *conv_weights(self.conv1d), self.dt_bias, self.A_log, weight_of(self.norm), nheads=form.heads,
            ngroups=form.groups, d_state=form.d_state, directions=form.directions, shift=form.shift,
            combine=self.joined, dt_limits=(form.low, form.high), cu_seqlens=cu_seqlens,
            context=self.context, chunk_size=self.config.chunk_size or None, **self.diagonal_options(),
            **self.norm_options, **self.layer_options,
        )  # fmt: skip
        return self.out_proj(y)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        return self.mix_projected(self.in_proj(x), cu_seqlens)

    def parts(
        self, x: Tensor, window: Tensor | None = None, in_place: bool = False, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, ScanArguments, Tensor | None]:
        """The gate z (..., d_inner), the arguments of the scan, and the window behind x, as `convolve` has it."""
        z, channels, raw = self.form.split(self.in_proj(x))
        options = {"causal": self.directions == 1, "activation": "silu", "cu_seqlens": cu_seqlens}
        options |= {"in_place": in_place, "context": self.context}
        mixed, window = convolve(self.conv1d, channels, window, **options)
        arguments = scan_arguments(self.form, mixed, raw, self.dt_bias, self.A_log, **self.diagonal_options())
        return z, arguments, window

    def values(self, x: Tensor) -> Tensor:
        return self.parts(x)[1].v

    def finish(self, y: Tensor, z: Tensor) -> Tensor:
        """Gated norm and output projection: y (..., H, P) and the gate z (..., H P) -> (..., d_model)."""
        return self.out_proj(norm_and_gate(gated_norm, y.flatten(-2), z, weight_of(self.norm), **self.norm_options))

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.finish(mixed, self.parts(x)[0])


class BidirectionalScanBlock(ScanBlock):
    """The layer with one scan from either end."""

    bidirectional_form = True
    directions = 2

    def direction_matrices(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `side_matrices` of the two scans."""
        sides = ((side.q, side.k, side.log_decay, side.input_scale) for side in self.parts(x)[1].sides)
        return side_matrices(*sides, shift=self.shift)

    def matrix(self, x: Tensor) -> Tensor:
        below, above = self.direction_matrices(x)
        return with_diagonal(below + above, self.parts(x)[1].diagonal)


def draw_dt_bias(shape: torch.Size, generator: torch.Generator, *, low: float, high: float, floor: float) -> Tensor:
    """softplus^-1 of step sizes drawn log-uniformly from [low, high] and floored."""
    dt = torch.empty(shape).uniform_(math.log(low), math.log(high), generator=generator).exp().clamp(min=floor)
    return dt + torch.log(-torch.expm1(-dt))


def draw_log_of_uniform(shape: torch.Size, generator: torch.Generator, *, low: float, high: float) -> Tensor:
    """Logarithms of values drawn uniformly from [low, high]."""
    return torch.empty(shape).uniform_(low, high, generator=generator).log()


def semiseparable_matrix(q: Tensor, k: Tensor, log_decay: Tensor, input_scale: Tensor) -> Tensor:
    """M[t, s] = q_t . k_s input_scale_s exp(sum of log_decay over s + 1 .. t) for s <= t, else 0.

    q, k (B, L, ngroups, N); log_decay, input_scale (B, L, H). Returns (B, H, L, L).
    """
    length, heads = log_decay.shape[1:]
    q, k = (working(part).repeat_interleave(heads // part.shape[2], dim=2) for part in (q, k))
    weights = torch.einsum("bthn,bshn->bhts", q, k * input_scale.unsqueeze(-1))
    # Column s sums the decays of the rows below s, from nothing at row s.
    below = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-1)
    steps = log_decay.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, length)
    return (weights * steps.masked_fill(~below, 0.0).cumsum(-2).exp()).tril()


def side_matrices(forward: tuple[Tensor, ...], backward: tuple[Tensor, ...], *, shift: bool) -> tuple[Tensor, Tensor]:
    """The matrices (B, H, L, L) of a scan from either end, on and below, and on and above the diagonal, or with `shift`
    below and above it. forward, backward: as of `semiseparable_matrix`."""
    below = semiseparable_matrix(*forward)
    above = semiseparable_matrix(*(part.flip(1) for part in backward)).flip(-1, -2)
    if shift:
        # Row t becomes what row t - 1 (t + 1) was.
        below = F.pad(below[:, :, :-1], (0, 0, 1, 0))
        above = F.pad(above[:, :, 1:], (0, 0, 0, 1))
    return below, above


def with_diagonal(matrix: Tensor, diagonal: Tensor | None) -> Tensor:
    """A matrix (B, H, L, L) plus a diagonal (B, L, H), if there is one."""
    return matrix if diagonal is None else matrix + torch.diag_embed(diagonal.transpose(1, 2))
