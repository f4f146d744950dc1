"""CKConv (arXiv 2102.02611): convolutions whose kernel is a network of sines as a function of the relative position."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.model.initialization import constant_init
from matmix.model.mixers.convolutions.implicit import ImplicitConvolution, SineFilter
from matmix.model.mixers.convolutions.long import long_convolution_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class CKConvConfig:
    """Options of CKConv."""

    filter_width: int = 32
    """Hidden width of the kernel's network."""
    filter_layers: int = 2
    """Its hidden layers."""
    sine_frequency: float = 25.0
    """Omega_0: initial factor inside the sines."""
    bias: bool = True
    """Bias in the output projection."""


class CKConv(ImplicitConvolution):
    """out_proj(gelu(h convolved with x, plus a bias)), h a network of sines for each channel: M = T(h)."""

    Config = CKConvConfig

    def __init__(self, d_model: int, config: CKConvConfig, *, max_seqlen: int, **options):
        super().__init__(d_model, config, max_seqlen=max_seqlen, **options)
        self.filter = SineFilter(d_model, config, max_seqlen, terms=max_seqlen)
        self.conv_bias = nn.Parameter(torch.empty(d_model))
        self.out_proj = nn.Linear(d_model, d_model, bias=config.bias)
        self.init_rules |= {"conv_bias": constant_init(0.0)}

    @classmethod
    def mixing_flops(cls, d_model: int, config: CKConvConfig, seqlen: int, causal: bool) -> float:
        return cls.filter_flops(d_model, config, causal) + d_model * (long_convolution_flops(seqlen) + 2)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.conv_bias.to(x.dtype)

    def finish(self, y: Tensor, rest: Tensor) -> Tensor:
        return self.out_proj(F.gelu(y + rest))
