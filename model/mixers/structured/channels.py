"""Linear maps over the channels whose matrices have structure, for MLPs (`model.mlp`)."""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.model.initialization import normal_init


class ChannelMap(nn.Module):
    """y = W x + b, x (..., inputs) -> (..., outputs). W is made of `factors`; `matrix` is its definition.

    Factors keep the variance of what they are given, but for the last, behind which it is that behind a dense matrix
    whose entries have the standard deviation `std`. No number of W is computed; a token costs a multiply-add for each
    weight of the factors.
    """

    option: ClassVar[str]
    """The model's option that is `size`."""

    def __init__(self, inputs: int, outputs: int, size: int, *, bias: bool, std: float):
        super().__init__()
        factors = self.factors(inputs, outputs, size)
        last = list(factors)[-1]
        self.terms, self.init_rules = {}, {}
        for name, (shape, terms) in factors.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            self.terms[name] = terms
            self.init_rules[name] = normal_init((std * math.sqrt(inputs) if name == last else 1.0) * terms**-0.5)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    @staticmethod
    def default(d_model: int) -> int:
        """The `size` that 0 stands for."""
        return 4

    @staticmethod
    def factors(inputs: int, outputs: int, size: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Returns the shape of each factor, in the order they are applied in, and how many terms its sums have. Raises
        ValueError (the end of a line) where there is no such map."""
        raise NotImplementedError

    @classmethod
    def weights(cls, inputs: int, outputs: int, size: int) -> int:
        """Numbers in the factors."""
        return sum(math.prod(shape) for shape, _ in cls.factors(inputs, outputs, size).values())

    def sums(self) -> dict[str, tuple[float, float]]:
        """As `Mixer.sums`."""
        return {name: (terms, 1.0) for name, terms in self.terms.items()}

    def matrix(self) -> Tensor:
        """W (outputs, inputs)."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """W x."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class LowRank(ChannelMap):
    """W = second first, of rank `size` at most."""

    option = "mlp_rank"

    @staticmethod
    def default(d_model: int) -> int:
        return math.isqrt(d_model - 1) + 1

    @staticmethod
    def factors(inputs: int, outputs: int, size: int) -> dict[str, tuple[tuple[int, ...], int]]:
        return {"first": ((size, inputs), inputs), "second": ((outputs, size), size)}

    def matrix(self) -> Tensor:
        return self.second @ self.first

    def product(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.first), self.second)


class BlockDiagonal(ChannelMap):
    """W has `size` blocks (outputs / size, inputs / size) on its diagonal and is 0 elsewhere."""

    option = "mlp_blocks"

    @staticmethod
    def factors(inputs: int, outputs: int, size: int) -> dict[str, tuple[tuple[int, ...], int]]:
        if inputs % size or outputs % size:
            raise ValueError(f"must divide the widths of the MLPs, {inputs} and {outputs}")
        return {"weight": ((size, outputs // size, inputs // size), inputs // size)}

    def matrix(self) -> Tensor:
        return torch.block_diag(*self.weight)

    def product(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (self.weight.shape[0], -1))
        return torch.einsum("...cd,cbd->...cb", x, self.weight).flatten(-2)


class BlockTensorTrain(ChannelMap):
    """W_(ab, cd) = sum over r of second[a, c, r, b] first[c, d, a, r], r < size: two cores (arXiv 2406.06248).

    Inputs c d and outputs a b are the most even products there are, with d <= c and a <= b.
    """

    option = "mlp_rank"

    @staticmethod
    def default(d_model: int) -> int:
        return 1

    @staticmethod
    def factors(inputs: int, outputs: int, size: int) -> dict[str, tuple[tuple[int, ...], int]]:
        (d, c), (a, b) = even_product(inputs), even_product(outputs)
        return cores(a, b, c, d, size)

    def matrix(self) -> Tensor:
        w = torch.einsum("acrb,cdar->abcd", self.second, self.first)
        return w.flatten(2).flatten(0, 1)

    def grid(self, x: Tensor) -> Tensor:
        """W x as (..., a, b)."""
        x = torch.einsum("...cd,cdar->...car", x.unflatten(-1, self.first.shape[:2]), self.first)
        return torch.einsum("...car,acrb->...ab", x, self.second)

    def product(self, x: Tensor) -> Tensor:
        return self.grid(x).flatten(-2)


class MonarchMap(BlockTensorTrain):
    """Two block-diagonal factors of `size` blocks with a fixed permutation between them (arXiv 2204.00595).

    W_(ba, cd) = sum over r of second[a, c, r, b] first[c, d, a, r], a and c below `size`: a block tensor train of
    that many blocks, whose outputs stand in the other order. With sqrt(inputs) blocks it is square as `monarch_matrix`.
    """

    option = "mlp_blocks"

    @staticmethod
    def default(d_model: int) -> int:
        return 4

    @staticmethod
    def factors(inputs: int, outputs: int, size: int) -> dict[str, tuple[tuple[int, ...], int]]:
        rank, rest = divmod(min(inputs, outputs), size * size)
        if rest or max(inputs, outputs) % size:
            raise ValueError(f"its square must divide the narrower of the widths {inputs} and {outputs}, it the other")
        return cores(size, outputs // size, size, inputs // size, rank)

    def matrix(self) -> Tensor:
        w = torch.einsum("acrb,cdar->bacd", self.second, self.first)
        return w.flatten(2).flatten(0, 1)

    def product(self, x: Tensor) -> Tensor:
        return self.grid(x).mT.flatten(-2)


CHANNEL_MAPS: dict[str, type[ChannelMap]] = {
    "block_diagonal": BlockDiagonal,
    "btt": BlockTensorTrain,
    "low_rank": LowRank,
    "monarch": MonarchMap,
}


def cores(a: int, b: int, c: int, d: int, rank: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """The factors of a block tensor train."""
    return {"first": ((c, d, a, rank), d), "second": ((a, c, rank, b), c * rank)}


def even_product(n: int) -> tuple[int, int]:
    """The two factors of n, the smaller one first, that are nearest to each other."""
    small = next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)
    return small, n // small
