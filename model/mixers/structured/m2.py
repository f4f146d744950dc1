"""Monarch Mixer (M2, arXiv 2310.12109): Monarch matrices over the tokens, and over the channels."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.model.calls import weights_of
from matmix.model.initialization import normal_init
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.structured.butterfly import (
    monarch_flops,
    monarch_matrix,
    monarch_parameters,
    monarch_product,
)
from matmix.model.mixers.structured.matrix_mixer import MixingParameters


@dataclass(frozen=True, kw_only=True, slots=True)
class M2Config:
    """Options of Monarch Mixer."""

    mix_channels: bool = True
    """The second half, over the channels; without it an MLP can follow (model.mlp_ratio)."""


class M2(Mixer):
    """x' = M2 relu(n * M1 x) over the tokens, then y = x' + M4 relu(d * M3 x') over the channels.

    M1 to M4 are Monarch matrices, n (d_model, N) and d (d_model) weigh each number between them; N = max_seqlen. As
    relu(h) = [h > 0] h, the matrix of channel c is M2 diag([h_c > 0] n_c) M1; the second half belongs to `combine`.
    """

    Config = M2Config
    bidirectional_form = True
    sequence_aligned = False
    fixed_length = True
    complexity = "O(L^1.5)"

    def __init__(self, d_model: int, config: M2Config, *, max_seqlen: int, output_std: float, **options):
        super().__init__(d_model, config, max_seqlen=max_seqlen, output_std=output_std, **options)
        self.m1 = MixingParameters(monarch_parameters(1, max_seqlen))
        self.m2 = MixingParameters(monarch_parameters(1, max_seqlen, output_std))
        self.n_kernel = nn.Parameter(torch.empty(d_model, max_seqlen))
        self.init_rules = {"n_kernel": normal_init(1.0)}
        if config.mix_channels:
            self.m3, self.m4 = (MixingParameters(monarch_parameters(1, d_model)) for _ in range(2))
            self.d_kernel = nn.Parameter(torch.empty(d_model))
            self.init_rules |= {"d_kernel": normal_init(1.0)}

    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {"n_kernel": ()}

    def sums(self) -> dict[str, tuple[float, float]]:
        parts = {name: part for name, part in self.named_parameters() if name[:2] in ("m3", "m4")}
        return {name: (part.shape[-1], 1.0) for name, part in parts.items()}

    @classmethod
    def mixing_flops(cls, d_model: int, config: M2Config, seqlen: int, causal: bool) -> float:
        channels = 2 * monarch_flops(d_model) + 3 * d_model if config.mix_channels else 0
        return d_model * (2 * monarch_flops(seqlen) / seqlen + 2) + channels

    def hidden(self, x: Tensor) -> Tensor:
        """n * M1 x (B, L, d_model)."""
        return self.n_kernel.mT * times(self.m1, x)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        return self.over_channels(times(self.m2, F.relu(self.hidden(x))))

    def over_channels(self, x: Tensor) -> Tensor:
        """x + M4 relu(d * M3 x), (B, L, d_model)."""
        if not self.config.mix_channels:
            return x
        return x + times(self.m4, F.relu(self.d_kernel.unsqueeze(-1) * times(self.m3, x.mT))).mT

    def matrix(self, x: Tensor) -> Tensor:
        """M (B, d_model, L, L)."""
        first, second = (
            monarch_matrix(*weights_of(part, "blkdiag1", "blkdiag2"), x.shape[1]) for part in (self.m1, self.m2)
        )
        weights = (self.hidden(x) > 0).mT * self.n_kernel
        return (second * weights.unsqueeze(-2)) @ first

    def values(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.over_channels(mixed.squeeze(-1))


def times(monarch: MixingParameters, x: Tensor) -> Tensor:
    """A Monarch matrix times x (B, n, columns) from the left."""
    return monarch_product(*weights_of(monarch, "blkdiag1", "blkdiag2"), x.unsqueeze(2)).squeeze(2)
