"""Hyena of order 2 (arXiv 2302.10866): gates before and after a long convolution whose filter is a small network's
function of the offset."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from matmix.kernels.context import Context
from matmix.model.initialization import normal_init
from matmix.model.mixers.base import ShortConv, convolve, zero_state
from matmix.model.mixers.convolutions.implicit import ImplicitConvolution, SineFilter
from matmix.model.mixers.convolutions.long import convolution_matrix, long_convolution_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class HyenaConfig:
    """Options of the Hyena mixer."""

    d_conv: int = 3
    """Width of the depthwise convolution behind the input projection (odd, 3 to 9)."""
    filter_width: int = 64
    """Hidden width of the filter's network."""
    filter_layers: int = 3
    """Hidden layers of the filter's network."""
    filter_features: int = 17
    """Features of an offset (odd): itself, and cosines and sines of (filter_features - 1) / 2 frequencies."""
    sine_frequency: float = 10.0
    """Initial factor inside the sines that are the network's activations."""
    fast_decay: float = 0.3
    """Share of max_seqlen over which the fastest channel's filter falls to 1 % at initialisation."""
    slow_decay: float = 1.5
    """The same of the slowest channel."""
    bias: bool = True
    """Biases in the input and output projections."""
    conv_bias: bool = True
    """Bias in the short convolution."""
    residual: bool = False
    """A second long convolution, of the layer's input, is added in front of out_proj, as in M2-BERT (arXiv
    2310.12109)."""

    def channels(self, d_model: int) -> int:
        """Channels of the long convolutions together."""
        return (1 + self.residual) * d_model


class HyenaFilter(SineFilter):
    """Its features are waves of the offset, its window an exponential."""

    def __init__(self, d_model: int, config: HyenaConfig, max_seqlen: int) -> None:
        super().__init__(config.channels(d_model), config, max_seqlen, features=config.filter_features)
        self.d_model = d_model

    def features(self, offsets: Tensor) -> Tensor:
        count = (self.config.filter_features - 1) // 2
        frequencies = torch.linspace(1e-4, max(count - 1, 1e-4), count, dtype=offsets.dtype, device=offsets.device)
        angles = 2 * math.pi * offsets.unsqueeze(-1) * frequencies
        return torch.cat([offsets.unsqueeze(-1), angles.cos(), -angles.sin()], -1)

    def window(self, offsets: Tensor) -> Tensor:
        """exp(-rate_c |offset|) (n, channels)."""
        fast, slow = (math.log(100) / share for share in (self.config.fast_decay, self.config.slow_decay))
        rates = torch.linspace(slow, fast, self.d_model, dtype=offsets.dtype, device=offsets.device)
        return (-offsets.abs().unsqueeze(-1) * rates.repeat(self.channels // self.d_model)).exp()


class Hyena(ImplicitConvolution):
    """in_proj -> [x0 | x1 | v] -> conv -> x0 * (h convolved with (x1 * v), plus D x1 * v) -> out_proj.

    So M = diag(x0) (T(h) + D) diag(x1) for each channel. The bidirectional form has filters over negative offsets too
    and a centred short convolution. A step of the causal form evaluates the convolution of all tokens so far.
    With `residual` there are as many channels more, of x itself with gates of 1, which are added to the others in front
    of out_proj; one network makes all filters.
    """

    Config = HyenaConfig
    data_dependent = True
    sequence_aligned = True
    not_decayed = ("D",)

    def __init__(self, d_model: int, config: HyenaConfig, *, max_seqlen: int, **options):
        super().__init__(d_model, config, max_seqlen=max_seqlen, **options)
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=config.bias)
        self.conv1d = ShortConv(3 * d_model, config.d_conv, config.conv_bias)
        self.filter = HyenaFilter(d_model, config, max_seqlen)
        self.D = nn.Parameter(torch.empty(config.channels(d_model)))
        self.out_proj = nn.Linear(d_model, d_model, bias=config.bias)
        self.init_rules |= {"D": normal_init(1.0)}

    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj.weight": 3 * (self.d_model,)}

    @classmethod
    def check(cls, d_model: int, config: HyenaConfig) -> None:
        super().check(d_model, config)
        odd = config.filter_features >= 1 and config.filter_features % 2 == 1
        cls.require(odd, config, "filter_features", "must be odd")
        cls.require(config.d_conv in range(3, 10, 2), config, "d_conv", "must be odd and from 3 to 9")
        for name in ("fast_decay", "slow_decay"):
            cls.require(getattr(config, name) > 0, config, name, "must be above 0")

    @classmethod
    def mixing_flops(cls, d_model: int, config: HyenaConfig, seqlen: int, causal: bool) -> float:
        channels = config.channels(d_model)
        network = cls.filter_flops(channels, config, causal, config.filter_features)
        return network + channels * (long_convolution_flops(seqlen) + 4)

    def gates(
        self, x: Tensor, window: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """x0, x1 and v (..., channels) from x (..., d_model), and the window behind x, as `base.convolve` has it."""
        options = {"causal": self.causal, "cu_seqlens": cu_seqlens, "context": self.context}
        convolved, window = convolve(self.conv1d, self.in_proj(x), window, **options)
        gates = convolved.chunk(3, -1)
        if self.config.residual:
            x = x.to(convolved.dtype)
            more = (torch.ones_like(x), torch.ones_like(x), x)
            gates = tuple(torch.cat(parts, -1) for parts in zip(gates, more, strict=True))
        return gates, window

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        if cu_seqlens is not None and x.shape[1] == 0:
            return x  # the short convolution takes no empty rows
        (x0, x1, v), _ = self.gates(x, cu_seqlens=cu_seqlens)
        return self.finish(x0, x1 * v, cu_seqlens, self.context)

    def finish(self, x0: Tensor, u: Tensor, cu_seqlens: Tensor | None = None, context: Context | None = None) -> Tensor:
        """The convolution of u (B, L, channels) and what follows, for its last tokens, of which x0 are the gates."""
        y = self.convolved(u, cu_seqlens, context) + self.D * u
        return self.project(x0 * y[:, u.shape[1] - x0.shape[1] :].to(x0.dtype))

    def project(self, y: Tensor) -> Tensor:
        """(..., channels) -> (..., d_model)."""
        return self.out_proj(sum(y.chunk(2, -1)) if self.config.residual else y)

    def matrix(self, x: Tensor) -> Tensor:
        """diag(x0) (T(h) + D) diag(x1), (B, channels, L, L)."""
        x0, x1, _ = (part.transpose(1, 2) for part in self.gates(x)[0])
        t = convolution_matrix(*self.filters(x.shape[1], x)).to(self.D.dtype)
        t = t + torch.diag_embed(self.D.unsqueeze(-1).expand(t.shape[:-1]))
        return x0.unsqueeze(-1) * t * x1.unsqueeze(-2)

    def values(self, x: Tensor) -> Tensor:
        return self.gates(x)[0][2].unsqueeze(-1)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.project(mixed.squeeze(-1))

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """The state before the first token: the last inputs of the short convolution, zeros (batch_size, 3 d_model,
        d_conv - 1), and the products x1 v of all tokens so far, empty (batch_size, 0, channels)."""
        width = self.config.d_conv - 1
        window = zero_state(self.conv1d, device, batch_size, 3 * self.d_model, width)
        return window, zero_state(self.conv1d, device, batch_size, 0, self.filter.channels)

    def forward_with_state(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        (x0, x1, v), window = self.gates(x, state[0])
        channels = self.filter.channels
        u = torch.cat([state[1].to(v.dtype), (x1 * v).view(x.shape[0], -1, channels)], 1)
        return self.finish(x0.view(x.shape[0], -1, channels), u).view_as(x), (window, u)

    step = forward_with_state
