"""The block of the matrix mixers without a matrix: only its short convolution mixes tokens. It is a control in
comparisons.

The difference between a mixer with a convolution in front and this block shows what the mixer's matrix adds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from matmix.model.mixers.base import Mixer, RMSNormWeight, ShortConv, convolve, gated, zero_state


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionConfig:
    """Options of the block without a matrix."""

    expand: int = 2
    """Inner width over d_model."""
    project: bool = True
    """False: the convolution reads the tokens themselves, as in the MRU, not a projection of them; expand is then 1."""
    norm: bool = True
    """An RMSNorm in front of the gate, or in the MRU's block none."""
    d_conv: int = 0
    """Width of the depthwise convolution (2 to 9; odd in encoders, where it is centred); 0 = 4 in language models, 7 in
    encoders."""
    bias: bool = False
    """Biases in the input and output projections."""
    conv_bias: bool = True
    """Bias in the convolution."""


class Convolution(Mixer):
    """in_proj -> [z | v] -> conv + silu -> gated norm -> out_proj: M is the identity; only the convolution mixes.

    Without a projection v is x, and without a norm the gate is all that lies between the convolution and out_proj.
    """

    Config = ConvolutionConfig
    causal_form = True
    takes_context = True
    bidirectional_form = True
    data_dependent = False
    sequence_aligned = False
    static_step = True
    carries = True

    def __init__(self, d_model: int, config: ConvolutionConfig, *, causal: bool, **options):
        super().__init__(d_model, config, causal=causal, **options)
        self.d_inner, self.d_conv = config.expand * d_model, self.taps(config, causal)
        if not causal and self.d_conv % 2 == 0:
            raise ValueError(f"model.mixers.{self.name}.d_conv = {self.d_conv}: must be odd in encoders")
        self.in_proj = nn.Linear(d_model, (1 + config.project) * self.d_inner, bias=config.bias)
        self.conv1d = ShortConv(self.d_inner, self.d_conv, config.conv_bias)
        self.norm = RMSNormWeight(self.d_inner) if config.norm else None
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=config.bias)

    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj.weight": (1 + self.config.project) * (self.d_inner,)}

    @staticmethod
    def taps(config: ConvolutionConfig, causal: bool) -> int:
        """Width of the convolution in one form."""
        return config.d_conv or (4 if causal else 7)

    @classmethod
    def check(cls, d_model: int, config: ConvolutionConfig) -> None:
        cls.require_least(config, expand=1)
        cls.require(config.project or config.expand == 1, config, "expand", "must be 1 with project = false")
        cls.require(config.d_conv in (0, *range(2, 10)), config, "d_conv", "must be 0 or from 2 to 9")

    @classmethod
    def has_convolution(cls, config: ConvolutionConfig) -> bool:
        return True

    @classmethod
    def reach(cls, config: ConvolutionConfig, causal: bool) -> int:
        return cls.taps(config, causal) - 1 if causal else cls.taps(config, causal) // 2

    def parts(
        self, x: Tensor, window: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gate z and the convolution's outputs v, both (..., d_inner), and the window of `convolve`."""
        z, inputs = self.in_proj(x).chunk(2, -1) if self.config.project else (self.in_proj(x), x)
        options = {"causal": self.causal, "activation": "silu", "cu_seqlens": cu_seqlens, "context": self.context}
        return z, *convolve(self.conv1d, inputs, window, **options)

    def finish(self, v: Tensor, z: Tensor) -> Tensor:
        """Gate, norm and output projection: (..., d_inner) each -> (..., d_model)."""
        return self.out_proj(gated(v, z, self.norm))

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        z, v, _ = self.parts(x, cu_seqlens=cu_seqlens)
        return self.finish(v, z)

    def initial_state(self, batch_size: int, device: torch.device | None = None) -> Tensor:
        """The last inputs of the convolution, zeros (batch_size, d_inner, d_conv - 1)."""
        return zero_state(self.conv1d, device, batch_size, self.d_inner, self.d_conv - 1)

    def forward_with_state(self, x: Tensor, state: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, v, state = self.parts(x, state, cu_seqlens)
        return self.finish(v, z), state

    step = forward_with_state

    def matrix(self, x: Tensor) -> Tensor:
        return torch.eye(x.shape[1], dtype=x.dtype, device=x.device).expand(1, 1, -1, -1)

    def values(self, x: Tensor) -> Tensor:
        return self.parts(x)[1].unsqueeze(-2)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.finish(mixed.flatten(-2), self.parts(x)[0])
