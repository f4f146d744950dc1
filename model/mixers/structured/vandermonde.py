"""Differences of two Vandermonde matrices in the shared block of the matrix mixers (arXiv 2407.09941)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from matmix.model.calls import weights_of
from matmix.model.initialization import InitRule
from matmix.model.mixers.structured.matrix_mixer import QueryKeyConfig, QueryKeyMixer, mix_in_row_blocks

MOST_TURNS = 64.0
"""Powers go up to here. The rounding of q to float32 turns q^10 by 0.014 degrees here, and by 14 at 65,536 turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VandermondeConfig(QueryKeyConfig):
    """Options of the Vandermonde mixers."""

    eps: float = 1e-3
    """How many turns a query or key of 1 adds from one position to the next: 0.001 in the papers' code where M is made
    from the data, 1 in their text and where it is made of parameters. Near 1, train in float32: rounding queries and
    keys made from the data to bf16 changes the outputs of an initial layer by 20 % at 300 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VandermondeDDConfig(VandermondeConfig):
    """Options of the Vandermonde mixer whose queries and keys are made from the data."""

    angle: Literal["product", "power"] = "product"
    """2 pi eps q j ("product"), as the papers' code has it, or 2 pi q^j ("power"), as their text writes it to the
    letter; powers end at 64 turns, as rounding makes the angles of much larger ones, and do not use eps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VandermondeDIConfig(VandermondeConfig):
    """Options of the Vandermonde mixer whose queries and keys are parameters."""

    combination: Literal["difference", "sum"] = "difference"
    """cos - cos ("difference"), or cos + cos ("sum"), as the papers' code has it for parameters."""


class Vandermonde(QueryKeyMixer):
    """M_ij = (2 N d)^-1/2 sum over d of cos(2 pi eps q_id j) - cos(2 pi eps k_jd i), N = max_seqlen, in float32."""

    complexity = "O(L^2)"
    activated_inputs = False
    powers = False
    """Angles are 2 pi q^j and 2 pi k^i."""
    sign = -1
    """Of the second cosine."""

    @classmethod
    def check(cls, d_model: int, config: VandermondeConfig) -> None:
        super().check(d_model, config)
        cls.require(0 < config.eps < math.inf, config, "eps", "must be above 0, and finite")

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: VandermondeConfig, seqlen: int) -> float:
        # Twice for each pair and channel of q: phase, cosine, sum.
        return seqlen * (6.0 * nheads * config.qk_dim + 2.0 * d_inner)

    def scale(self) -> float:
        return (2 * self.max_seqlen * self.config.qk_dim) ** -0.5

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        exact = torch.promote_types(v.dtype, torch.float32)
        q, k = (part.permute(0, 2, 1, 3).to(exact) for part in self.queries_and_keys(inputs))  # (B, H, L, d)
        positions = torch.arange(v.shape[1], device=v.device, dtype=exact)
        of_rows = torch.cos(self.angles(q.unsqueeze(3), positions.view(1, 1, 1, -1, 1)))
        of_columns = torch.cos(self.angles(k.unsqueeze(2), positions.view(1, 1, -1, 1, 1)))
        return torch.add(of_rows, of_columns, alpha=self.sign).sum(-1) * self.scale()

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        return mix_in_row_blocks(self.rows, *self.queries_and_keys(inputs), v) * self.scale()

    def angles(self, x: Tensor, positions: Tensor) -> Tensor:
        """Angles of queries or keys at positions of the same dtype, broadcast."""
        if not self.powers:
            return 2 * math.pi * self.config.eps * x * positions
        # Queries are bounded, not powers: those that overflow would have NaN for a gradient.
        bound = MOST_TURNS ** (1 / positions.clamp(min=1))
        return 2 * math.pi * torch.minimum(torch.maximum(x, -bound), bound) ** positions

    def rows(self, q: Tensor, k: Tensor, first: int) -> Tensor:
        """Rows of the matrix without its scale, (B, H, R, L), for q (B, R, H, d) and k (B, L, H, d)."""
        columns = torch.arange(k.shape[1], device=k.device, dtype=k.dtype)
        rows = torch.arange(first, first + q.shape[1], device=q.device, dtype=q.dtype)
        q, k = (part.permute(0, 2, 3, 1) for part in (q, k))  # (B, H, d, R or L)
        of_rows = torch.cos(self.angles(q.unsqueeze(-1), columns)).sum(2)
        of_columns = torch.cos(self.angles(k.unsqueeze(-2), rows.unsqueeze(-1))).sum(2)
        return torch.add(of_rows, of_columns, alpha=self.sign)


class VandermondeDI(Vandermonde):
    """q and k are parameters (H, d, N).

    Weights stored in bfloat16 change M, by 4 % from initial weights: a frequency's rounding, of up to 16 turns over the
    whole length, is up to 0.03 turns of phase. Keep these weights in float32, as in training.

    With combination "sum", M_ij = (2 N d)^-1/2 sum over d of cos(2 pi eps q_id j) + cos(2 pi eps k_jd i).
    """

    Config = VandermondeDIConfig
    fixed_length = True
    not_decayed = ("matrix_mixer.q_bias", "matrix_mixer.k_bias")

    @property
    def sign(self) -> int:
        return 1 if self.config.combination == "sum" else -1

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        shape = (self.nheads, self.config.qk_dim, self.max_seqlen)
        return dict.fromkeys(("q_bias", "k_bias"), (shape, partial(draw_frequencies, eps=self.config.eps)))

    def queries_and_keys(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k = weights_of(self.matrix_mixer, "q_bias", "k_bias")
        return q.permute(2, 0, 1).unsqueeze(0), k.permute(2, 0, 1).unsqueeze(0)


class VandermondeDD(Vandermonde):
    """q and k are projected from x.

    With angle "power", M_ij = (2 N d)^-1/2 sum over d of cos(2 pi q_id^j) - cos(2 pi k_jd^i). Where |q| < 1, powers
    fade and M mixes the first positions alone; where |q| > 1, they soon turn faster than float32 can tell.
    """

    Config = VandermondeDDConfig
    data_dependent = sequence_aligned = True

    @property
    def powers(self) -> bool:
        return self.config.angle == "power"


def draw_frequencies(shape: torch.Size, generator: torch.Generator, *, eps: float) -> Tensor:
    """Frequencies between -16 and 16 turns over the whole length, but not above half a turn per step.

    From frequencies of 0 every cosine is 1: M is 0, and so is its gradient. From small ones M is smooth and all rows
    are alike.
    """
    bound = min(0.5, 16 / shape[-1]) / eps
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound
