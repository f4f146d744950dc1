"""TNN (arXiv 2305.04749): gated Toeplitz matrices whose entries a network makes of the relative position."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from matmix.model.mixers.convolutions.implicit import ImplicitConvolution, ImplicitFilter
from matmix.model.mixers.convolutions.long import long_convolution_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class TNNConfig:
    """Options of TNN."""

    expand: int = 1
    """Inner width over d_model."""
    filter_width: int = 64
    """Hidden width of the network of relative positions."""
    filter_layers: int = 3
    """Its hidden layers."""
    decay: float = 0.99
    """Lambda: the entries m_t are multiplied by lambda^|t|."""
    bias: bool = True
    """Biases in the input and output projections."""


class RelativePositions(ImplicitFilter):
    """The relative position encoder: relu of hidden layers whose mean square is made 1, and the decay.

    Its unit is a token, as in the authors' code: the mean square leaves of x w + b its direction, which turns from one
    neighbour to the next, and hardly far away. In parts of the length all entries would start as one.
    """

    def activated(self, h: Tensor) -> Tensor:
        return F.relu(F.rms_norm(h, h.shape[-1:], eps=1e-6))

    def window(self, offsets: Tensor) -> Tensor:
        return (offsets.abs() * math.log(self.config.decay)).exp().unsqueeze(-1)


class TNN(ImplicitConvolution):
    """out_proj(u * T v), u and v = silu of projections: M = T for each channel, T_ij = lambda^|i-j| m(i - j).

    With model.mlp_ratio above 0 and model.mlp_gate the block is that of TNN.
    """

    Config = TNNConfig

    def __init__(self, d_model: int, config: TNNConfig, *, max_seqlen: int, **options):
        super().__init__(d_model, config, max_seqlen=max_seqlen, **options)
        self.d_inner = config.expand * d_model
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=config.bias)
        terms = min(max_seqlen, 1 / (1 - config.decay**2)) if config.decay < 1 else max_seqlen
        self.filter = RelativePositions(self.d_inner, config, unit=1, terms=terms)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=config.bias)

    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj.weight": 2 * (self.d_inner,)}

    @classmethod
    def check(cls, d_model: int, config: TNNConfig) -> None:
        super().check(d_model, config)
        cls.require(0 < config.decay <= 1, config, "decay", "must be above 0 and at most 1")

    @classmethod
    def mixing_flops(cls, d_model: int, config: TNNConfig, seqlen: int, causal: bool) -> float:
        inner = config.expand * d_model
        return cls.filter_flops(inner, config, causal) + inner * (long_convolution_flops(seqlen) + 3)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u, v = F.silu(self.in_proj(x)).chunk(2, -1)
        return v.contiguous(), u

    def finish(self, y: Tensor, rest: Tensor) -> Tensor:
        return self.out_proj(rest * y)
