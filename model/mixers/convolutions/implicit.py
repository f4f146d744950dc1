"""Long convolutions whose filter is a small network's function of the offset."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from matmix.kernels import over_heads
from matmix.kernels.context import Context, exchanged, share
from matmix.kernels.functions import outside_autocast, working
from matmix.model.initialization import constant_init, uniform_init
from matmix.model.mixers.base import ExactLinear, Mixer, exact_linear, zero_state
from matmix.model.mixers.convolutions.long import convolution_matrix, packed_convolution
from matmix.model.parameter_rules import NOT_DECAYED, ParameterRule


class ImplicitFilter(nn.Module):
    """h(offset) for all channels: an MLP of the options `filter_width` and `filter_layers`, times a window.

    Offsets are measured in `unit` tokens, such as max_seqlen, so that all lengths evaluate one function; longer ones
    extrapolate. `terms`: how many tokens count in an output, about; initial outputs are as large as inputs then.
    """

    def __init__(self, channels: int, config: Any, unit: int, *, features: int = 1, terms: float = 1.0) -> None:
        super().__init__()
        self.channels, self.config, self.unit = channels, config, unit
        widths = [features, *[config.filter_width] * config.filter_layers]
        self.layers = nn.ModuleList(ExactLinear(*pair) for pair in itertools.pairwise(widths))
        self.out = ExactLinear(config.filter_width, channels, bias=False)
        self.init_rules = {"out.weight": uniform_init((config.filter_width * terms) ** -0.5)}
        for index, width in enumerate(widths[:-1]):
            rule = uniform_init(width**-0.5)
            self.init_rules |= {f"layers.{index}.weight": rule, f"layers.{index}.bias": rule}

    def parameter_rules(self, seqlen: int) -> dict[str, ParameterRule]:
        # It is a function of the offset, and smaller weights are another function.
        return {name: NOT_DECAYED for name, _ in self.named_parameters()}

    def features(self, offsets: Tensor) -> Tensor:
        """(n, features) from offsets (n,), which may be negative, in units."""
        return offsets.unsqueeze(-1)

    def activated(self, h: Tensor) -> Tensor:
        """What follows each hidden layer."""
        raise NotImplementedError

    def window(self, offsets: Tensor) -> Tensor | float:
        """The factor of h, (n, channels) or what spreads to it."""
        return 1.0

    @outside_autocast
    def forward(self, offsets: Tensor) -> Tensor:
        """h (channels, n) in float32 at least at offsets (n,) in tokens. Sines multiply errors by their frequency:
        bfloat16 would round the filter to noise, and neighbouring offsets to one."""
        offsets = offsets.to(torch.promote_types(offsets.dtype, torch.float32)) / self.unit
        h = self.features(offsets)
        for layer in self.layers:
            h = self.activated(exact_linear(h, layer))
        return (exact_linear(h, self.out) * self.window(offsets)).T


class SineFilter(ImplicitFilter):
    """Sines are the activations (SIREN), of frequencies that are learned; they start at `sine_frequency`."""

    def __init__(self, channels: int, config: Any, unit: int, **options: Any) -> None:
        super().__init__(channels, config, unit, **options)
        self.freq = nn.Parameter(torch.empty(config.filter_width))
        self.init_rules["freq"] = constant_init(config.sine_frequency)

    def activated(self, h: Tensor) -> Tensor:
        return torch.sin(self.freq.to(h.dtype) * h)


class ImplicitConvolution(Mixer):
    """y = finish(h convolved with v): M = T(h) for each channel, in both directions or of earlier tokens alone.

    A subclass has a `filter`, and `parts` and `finish` before and behind it. A step of the causal form evaluates the
    convolution of all tokens so far.
    """

    filter: ImplicitFilter
    causal_form = True
    bidirectional_form = True
    takes_context = True
    sequence_aligned = False
    data_dependent = False
    complexity = "O(L log L)"

    @classmethod
    def check(cls, d_model: int, config: Any) -> None:
        super().check(d_model, config)
        cls.require_least(config, filter_width=1, filter_layers=1, expand=1)
        finite = math.isfinite(getattr(config, "sine_frequency", 0.0))
        cls.require(finite, config, "sine_frequency", "must be finite")

    @staticmethod
    def filter_flops(channels: int, config: Any, causal: bool, features: int = 1) -> float:
        """What the network of a filter costs that `flops_per_token` has not counted as linear layers: it is counted as
        made for each document, which a batch shares; that of later tokens here."""
        width = config.filter_width
        return 0.0 if causal else 2.0 * width * (features + (config.filter_layers - 1) * width + channels)

    def filters(self, length: int, like: Tensor, context: Context | None = None) -> tuple[Tensor, ...]:
        """h at offsets 0 .. length - 1 (channels, length), and if bidirectional at -1 .. -(length - 1), in the dtype
        of `like`, float32 at least. In a context each rank evaluates its share of the offsets and gets its share of the
        channels."""
        offsets = torch.arange(length, device=like.device, dtype=working(like[:0]).dtype)
        if not self.causal:
            offsets = torch.cat([offsets, -offsets[1:]])
        if context is None:
            h = self.filter(offsets)
        else:
            h = self.filter(offsets[share(len(offsets), context)])
            h = exchanged(h, 0, 1, context, joined=len(offsets))
        return (h,) if self.causal else (h[:, :length], h[:, length:])

    def convolved(self, v: Tensor, cu_seqlens: Tensor | None = None, context: Context | None = None) -> Tensor:
        """h convolved with v (B, L, channels)."""

        def run(v: Tensor, cu_seqlens: Tensor | None, channels: slice) -> Tensor:
            v = v.squeeze(-1)
            return packed_convolution(v, cu_seqlens, lambda length: self.filters(length, v, context)).unsqueeze(-1)

        return over_heads(run, context, cu_seqlens, v.unsqueeze(-1)).squeeze(-1)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """v (..., channels), and what `finish` is given besides, for x (..., d_model)."""
        raise NotImplementedError

    def finish(self, y: Tensor, rest: Tensor) -> Tensor:
        """(..., channels) -> (..., d_model)."""
        raise NotImplementedError

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        v, rest = self.parts(x)
        return self.finish(self.convolved(v, cu_seqlens, self.context).to(v.dtype), rest)

    def matrix(self, x: Tensor) -> Tensor:
        return convolution_matrix(*self.filters(x.shape[1], x)).unsqueeze(0)

    def values(self, x: Tensor) -> Tensor:
        return self.parts(x)[0].unsqueeze(-1)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.finish(mixed.squeeze(-1), self.parts(x)[1])

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> Tensor:
        """The v of all tokens so far: empty, (batch_size, 0, channels)."""
        return zero_state(self.out_proj, device, batch_size, 0, self.filter.channels)

    def forward_with_state(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        v, rest = self.parts(x)
        state = torch.cat([state.to(v.dtype), v.view(x.shape[0], -1, v.shape[-1])], 1)
        y = self.convolved(state)[:, state.shape[1] - v.numel() // (v.shape[0] * v.shape[-1]) :]
        return self.finish(y.to(v.dtype).view_as(v), rest), state

    step = forward_with_state
