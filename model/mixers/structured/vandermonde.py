"""Differences of two Vandermonde matrices in the shared block of the matrix mixers (arXiv 2407.09941)."""

import math

import torch
from torch import Tensor

from matmix.model.calls import weights_of
from matmix.model.initialization import InitRule
from matmix.model.mixers.structured.matrix_mixer import QueryKeyConfig, QueryKeyMixer, mix_in_row_blocks

TURNS_PER_STEP = 1e-3
"""Epsilon: how many turns a query or key of 1 adds from one position to the next."""

ANGLE = 2 * math.pi * TURNS_PER_STEP


class Vandermonde(QueryKeyMixer):
    """M_ij = (2 N d)^-1/2 sum over d of cos(2 pi eps q_id j) - cos(2 pi eps k_jd i), N = max_seqlen, in float32."""

    complexity = "O(L^2)"
    activated_inputs = False

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: QueryKeyConfig, seqlen: int) -> float:
        # Twice for each pair and channel of q: phase, cosine, sum.
        return seqlen * (6.0 * nheads * config.qk_dim + 2.0 * d_inner)

    def scale(self) -> float:
        return (2 * self.max_seqlen * self.config.qk_dim) ** -0.5

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        exact = torch.promote_types(v.dtype, torch.float32)
        q, k = (part.permute(0, 2, 1, 3).to(exact) for part in self.queries_and_keys(inputs))  # (B, H, L, d)
        positions = torch.arange(v.shape[1], device=v.device, dtype=exact)
        of_rows = torch.cos(ANGLE * q.unsqueeze(3) * positions.view(1, 1, 1, -1, 1))
        of_columns = torch.cos(ANGLE * k.unsqueeze(2) * positions.view(1, 1, -1, 1, 1))
        return (of_rows - of_columns).sum(-1) * self.scale()

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        return mix_in_row_blocks(vandermonde_rows, *self.queries_and_keys(inputs), v) * self.scale()


class VandermondeDI(Vandermonde):
    """q and k are parameters (H, d, N).

    Weights stored in bfloat16 change M, by 4 % from initial weights: a frequency's rounding, of up to 16 turns over the
    whole length, is up to 0.03 turns of phase. Keep these weights in float32, as in training.
    """

    fixed_length = True
    not_decayed = ("matrix_mixer.q_bias", "matrix_mixer.k_bias")

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        shape = (self.nheads, self.config.qk_dim, self.max_seqlen)
        return dict.fromkeys(("q_bias", "k_bias"), (shape, draw_frequencies))

    def queries_and_keys(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k = weights_of(self.matrix_mixer, "q_bias", "k_bias")
        return q.permute(2, 0, 1).unsqueeze(0), k.permute(2, 0, 1).unsqueeze(0)


class VandermondeDD(Vandermonde):
    """q and k are projected from x."""

    data_dependent = sequence_aligned = True


def vandermonde_rows(q: Tensor, k: Tensor, first: int) -> Tensor:
    """Rows of the matrix without its scale, (B, H, R, L), for q (B, R, H, d) and k (B, L, H, d)."""
    columns = torch.arange(k.shape[1], device=k.device, dtype=k.dtype)
    rows = torch.arange(first, first + q.shape[1], device=q.device, dtype=q.dtype)
    q, k = (ANGLE * part.permute(0, 2, 3, 1) for part in (q, k))  # (B, H, d, R or L)
    of_rows = torch.cos(q.unsqueeze(-1) * columns).sum(2)
    of_columns = torch.cos(k.unsqueeze(-2) * rows.unsqueeze(-1)).sum(2)
    return of_rows - of_columns


def draw_frequencies(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Frequencies between -16 and 16 turns over the whole length, but not above half a turn per step.

    From frequencies of 0 every cosine is 1: M is 0, and so is its gradient. From small ones M is smooth and all rows
    are alike.
    """
    bound = min(0.5, 16 / shape[-1]) / TURNS_PER_STEP
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound
