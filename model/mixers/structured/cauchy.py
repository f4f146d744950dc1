"""Cauchy matrices in the shared block of the matrix mixers (arXiv 2407.09941)."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from matmix.kernels.functions import working
from matmix.model.calls import weight_of
from matmix.model.initialization import InitRule, constant_init
from matmix.model.mixers.structured.matrix_mixer import QueryKeyConfig, QueryKeyMixer, mix_in_row_blocks

SMALLEST_DENOMINATOR = 1e-2
"""Below this 1 / x is continued by its tangent. With b >= 0.005 no denominator is that small, whatever q and k are."""

LARGEST_EXPONENT = 80.0
"""e^q is finite in float32 up to here, and 1 / e^q is 0 for all that is added."""


class Cauchy(QueryKeyMixer):
    """M_ij = (N d)^-1/2 sum over d of 1 / (e^q_id + e^k_jd + 2 b + 1e-8), N = max_seqlen, in float32."""

    complexity = "O(L^2)"
    activated_inputs = False

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: QueryKeyConfig, seqlen: int) -> float:
        # For each pair and channel of q: denominator, reciprocal, sum; four more for the tangent.
        per_term = 7.0 if cls.data_dependent else 3.0
        return seqlen * (per_term * nheads * config.qk_dim + 2.0 * d_inner)

    def summands(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """e^q + b and e^k + b, (B or 1, L, H, d), in float32 at least."""
        q, k = (positive(part) for part in self.queries_and_keys(inputs))
        return q, k

    @property
    def reciprocal(self) -> Callable[[Tensor], Tensor]:
        """Returns the function that takes denominators to terms."""
        return guarded_reciprocals if self.data_dependent else torch.reciprocal

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        q, k = (part.permute(0, 2, 1, 3) for part in self.summands(inputs))  # (B, H, L, d)
        return self.reciprocal(q.unsqueeze(3) + k.unsqueeze(2) + 1e-8).sum(-1) * self.scale()

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        rows = partial(cauchy_rows, reciprocal=self.reciprocal)
        return mix_in_row_blocks(rows, *self.summands(inputs), v) * self.scale()


class CauchyDI(Cauchy):
    """q and k are parameters (N, H, d), and there is no b."""

    fixed_length = True


class CauchyDD(Cauchy):
    """q and k are projected from x; b is one learned number.

    Nothing keeps b from becoming so negative that a denominator passes through zero. Denominators, not b, are guarded:
    a trained b below 0 is fine wherever e^q + e^k is large enough. The guard is 1 / x above `SMALLEST_DENOMINATOR` and
    its tangent below: finite, and with a gradient that leads back, which a constant has not. Denominators below, which
    need b < 0.005, give another M than the papers' code does, whose 1 / x changes sign at its pole.
    """

    data_dependent = sequence_aligned = True

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        # One entry rather than none: FSDP cannot shard a tensor without dimensions.
        return {"bias": ((1,), constant_init(0.5))}

    def summands(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k = super().summands(inputs)
        bias = weight_of(self.matrix_mixer, "bias").to(q.dtype)
        return q + bias, k + bias


def positive(x: Tensor) -> Tensor:
    """e^x in float32 at least, finite."""
    return working(x).clamp(max=LARGEST_EXPONENT).exp()


def cauchy_rows(q: Tensor, k: Tensor, first: int, reciprocal: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows of the matrix without its scale, (B, H, R, L), for q (B, R, H, d) and k (B, L, H, d)."""
    q, k = (part.permute(0, 2, 3, 1) for part in (q, k))
    return reciprocal((q + 1e-8).unsqueeze(-1) + k.unsqueeze(-2)).sum(2)


def guarded_reciprocals(x: Tensor) -> Tensor:
    """1 / x, and below `SMALLEST_DENOMINATOR` its tangent there."""
    tangent = (2 - x / SMALLEST_DENOMINATOR) / SMALLEST_DENOMINATOR
    # Clamped too: an infinite reciprocal, even where it is not chosen, would make the gradient NaN.
    return torch.where(x < SMALLEST_DENOMINATOR, tangent, x.clamp(min=SMALLEST_DENOMINATOR).reciprocal())
