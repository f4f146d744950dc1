"""Cauchy matrices in the shared block of the matrix mixers (arXiv 2407.09941)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from matmix.kernels.functions import working
from matmix.model.calls import weight_of
from matmix.model.initialization import InitRule, constant_init
from matmix.model.mixers.structured.matrix_mixer import QueryKeyConfig, QueryKeyMixer, mix_in_row_blocks

SMALL = 1e-8
"""Stands beside e^q + e^k in the papers' code."""

LARGEST_EXPONENT = 80.0
"""e^q is finite in float32 up to here, and 1 / e^q is 0 for all that is added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CauchyDDConfig(QueryKeyConfig):
    """Options of the Cauchy mixer whose queries and keys are made from the data."""

    denominator: Literal["exponential", "difference"] = "exponential"
    """e^q + e^k + 2 b ("exponential"), as the papers' code has it, or q - k + c ("difference"), as their text writes
    it, with one learned c."""
    guard: float = 0.01
    """Denominators below this do not give a pole, but values that stay finite; with differences, those nearer to 0 than
    this, whose terms are then at most 1 / guard. Differences want 1 to train. 0: 1 / x whatever x is, which can be
    infinite, as the papers' code computes it."""


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
        """What queries and keys add to denominators, (B or 1, L, H, d) each, in float32 at least."""
        q, k = (positive(part) for part in self.queries_and_keys(inputs))
        return q + SMALL, k

    @property
    def reciprocal(self) -> Callable[[Tensor], Tensor]:
        """Returns the function that takes denominators to terms."""
        return torch.reciprocal

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        q, k = (part.permute(0, 2, 1, 3) for part in self.summands(inputs))  # (B, H, L, d)
        return self.reciprocal(q.unsqueeze(3) + k.unsqueeze(2)).sum(-1) * self.scale()

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        rows = partial(cauchy_rows, reciprocal=self.reciprocal)
        return mix_in_row_blocks(rows, *self.summands(inputs), v) * self.scale()


class CauchyDI(Cauchy):
    """q and k are parameters (N, H, d), and there is no b."""

    fixed_length = True


class CauchyDD(Cauchy):
    """q and k are projected from x; b, or c, is one learned number.

    With denominator "difference", M_ij = (N d)^-1/2 sum over d of 1 / (q_id - k_jd + c). No c keeps all denominators
    from 0, as they have either sign and nothing bounds q and k. With "exponential" a trained b below 0 is fine wherever
    e^q + e^k is large enough; nothing keeps it from becoming so negative that a denominator passes through zero. With b
    >= 0.005 none is below the default guard, whatever q and k are.

    So denominators x are guarded, and neither b nor c. Terms are 1 / x from `guard` on. Below, they follow its tangent
    where denominators are to be positive: finite, and with a gradient that leads back, which a constant has not. With
    differences they are 1 / x for negative x too, and a straight line between the two, so that no entry is larger than
    (d / N)^1/2 / guard; with "exponential" and b > 0 none is than (d / N)^1/2 / (2 b).
    """

    Config = CauchyDDConfig
    data_dependent = sequence_aligned = True

    @classmethod
    def check(cls, d_model: int, config: CauchyDDConfig) -> None:
        super().check(d_model, config)
        cls.require(0 <= config.guard < float("inf"), config, "guard", "must be 0 (none) or more")

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        # One entry rather than none: FSDP cannot shard a tensor without dimensions.
        return {"c": ((1,), constant_init(1.0))} if self.differences else {"bias": ((1,), constant_init(0.5))}

    @property
    def differences(self) -> bool:
        """Whether denominators are q - k + c."""
        return self.config.denominator == "difference"

    @property
    def reciprocal(self) -> Callable[[Tensor], Tensor]:
        if not self.config.guard:
            return torch.reciprocal
        return partial(bounded_reciprocals if self.differences else guarded_reciprocals, least=self.config.guard)

    def summands(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k = self.queries_and_keys(inputs)
        if self.differences:
            return working(q) + weight_of(self.matrix_mixer, "c").to(working(q).dtype), -working(k)
        q, k = positive(q), positive(k)
        bias = weight_of(self.matrix_mixer, "bias").to(q.dtype)
        return q + bias + SMALL, k + bias


def positive(x: Tensor) -> Tensor:
    """e^x in float32 at least, finite."""
    return working(x).clamp(max=LARGEST_EXPONENT).exp()


def cauchy_rows(q: Tensor, k: Tensor, first: int, reciprocal: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows of the matrix without its scale, (B, H, R, L), for q (B, R, H, d) and k (B, L, H, d)."""
    q, k = (part.permute(0, 2, 3, 1) for part in (q, k))
    return reciprocal(q.unsqueeze(-1) + k.unsqueeze(-2)).sum(2)


def guarded_reciprocals(x: Tensor, least: float) -> Tensor:
    """1 / x, and below `least` its tangent there."""
    tangent = (2 - x / least) / least
    # Clamped too: an infinite reciprocal, even where it is not chosen, would make the gradient NaN.
    return torch.where(x < least, tangent, x.clamp(min=least).reciprocal())


def bounded_reciprocals(x: Tensor, least: float) -> Tensor:
    """1 / x, and between -`least` and `least` the straight line that joins the two."""
    near = x.abs() < least
    return torch.where(near, x / least**2, torch.where(near, least, x).reciprocal())
