"""The token mixing of MLP-Mixer (arXiv 2105.01601): an MLP over the positions, the same for every channel."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.model.calls import weight_of
from matmix.model.initialization import normal_init
from matmix.model.mixers.base import Mixer


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPMixerConfig:
    """Options of MLP-Mixer's token mixing."""

    token_mlp_ratio: float = 0.5
    """Hidden width over d_model."""
    bias: bool = True
    """Biases of both layers."""


class MLPMixer(Mixer):
    """down(gelu(up(x))) over tokens. With model.mlp_ratio above 0 the block is that of MLP-Mixer.

    As gelu(h) = Phi(h) h, Phi the normal distribution, it is a matrix made from the data, for channel c
    M_c = W_down diag(Phi(h_c)) W_up; what the biases add belongs to `combine`.
    """

    Config = MLPMixerConfig
    bidirectional_form = True
    sequence_aligned = False
    fixed_length = True

    def __init__(self, d_model: int, config: MLPMixerConfig, *, max_seqlen: int, output_std: float, **options):
        super().__init__(d_model, config, max_seqlen=max_seqlen, output_std=output_std, **options)
        hidden = self.hidden_width(d_model, config)
        self.up = nn.Linear(max_seqlen, hidden, bias=config.bias)
        self.down = nn.Linear(hidden, max_seqlen, bias=config.bias)
        # There is no projection behind: `down` is what writes to the residual stream.
        self.init_rules = {"up.weight": normal_init(max_seqlen**-0.5), "down.weight": normal_init(output_std)}

    @staticmethod
    def hidden_width(d_model: int, config: MLPMixerConfig) -> int:
        """Hidden width of the MLP."""
        return max(1, round(config.token_mlp_ratio * d_model))

    @classmethod
    def check(cls, d_model: int, config: MLPMixerConfig) -> None:
        fits = 0 < config.token_mlp_ratio < math.inf
        cls.require(fits, config, "token_mlp_ratio", "must be above 0, and finite")

    @classmethod
    def flops_per_token(cls, d_model: int, config: MLPMixerConfig, seqlen: int, causal: bool) -> float:
        return 2.0 * 2 * cls.hidden_width(d_model, config) * d_model

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        return self.down(F.gelu(self.up(x.mT))).mT

    def weights(self, x: Tensor) -> Tensor:
        """Phi of the hidden layer (B, d_model, hidden): the factor that gelu multiplies by."""
        return 0.5 * (1 + torch.erf(self.up(x.mT) / math.sqrt(2)))

    def matrix(self, x: Tensor) -> Tensor:
        """M (B, d_model, L, L)."""
        return (weight_of(self.down) * self.weights(x).unsqueeze(-2)) @ weight_of(self.up)

    def values(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        mixed = mixed.squeeze(-1)
        if not self.config.bias:
            return mixed
        return mixed + self.down(self.weights(x) * weight_of(self.up, "bias")).mT
