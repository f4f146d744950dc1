"""Products of sparse factors with fixed permutations between them: Monarch (arXiv 2204.00595, 2310.12109) and butterfly
(arXiv 1903.05895) matrices, also products of butterflies (Kaleidoscope, arXiv 2012.14966), in the shared block of the
matrix mixers (arXiv 2407.09941)."""

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.model.calls import weight_of, weights_of
from matmix.model.initialization import InitRule, normal_init
from matmix.model.mixers.structured.matrix_mixer import MatrixMixer, SharedBlockConfig


class Monarch(MatrixMixer):
    """Two block-diagonal factors of order sqrt(N), N = max_seqlen.

    Token a m + b stands in row a and column b of a grid of n rows and m columns. The first factor mixes within each
    row, the second within each column: M_(a m + b, c m + d) = blkdiag2[b, a, c] blkdiag1[c, b, d]. The grid is the
    most nearly square one that holds N tokens, n = ceil(sqrt N) and m = ceil(N / n); what is left of its last row,
    fewer than n places, is filled with zeros and not read.
    """

    fixed_length = True
    complexity = "O(L^1.5)"

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        return monarch_parameters(self.nheads, self.max_seqlen)

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: SharedBlockConfig, seqlen: int) -> float:
        return d_inner * monarch_flops(seqlen) / seqlen

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        return monarch_matrix(*weights_of(self.matrix_mixer, "blkdiag1", "blkdiag2"), v.shape[1]).unsqueeze(0)

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        return monarch_product(*weights_of(self.matrix_mixer, "blkdiag1", "blkdiag2"), v)


def monarch_grid(length: int) -> tuple[int, int]:
    """Rows and columns of the grid that holds `length` places."""
    rows = math.isqrt(length - 1) + 1
    return rows, -(-length // rows)


def monarch_parameters(heads: int, length: int, std: float = 1.0) -> dict[str, tuple[tuple[int, ...], InitRule]]:
    """Shapes and initial values of both factors. Each keeps the size of what it mixes, on average; `std` is the second
    one's factor on it."""
    rows, columns = monarch_grid(length)
    first, second = (heads, rows, columns, columns), (heads, columns, rows, rows)
    return {
        "blkdiag1": (first, normal_init(columns**-0.5)),
        "blkdiag2": (second, normal_init(std * rows**-0.5)),
    }


def monarch_flops(length: int) -> float:
    """Operations of a product with a vector."""
    rows, columns = monarch_grid(length)
    return 2.0 * (rows + columns) * rows * columns


def monarch_matrix(first: Tensor, second: Tensor, length: int) -> Tensor:
    """The matrix (H, length, length) of factors (H, rows, columns, columns) and (H, columns, rows, rows)."""
    position = torch.arange(length, device=first.device)
    row, column = position // first.shape[-1], position % first.shape[-1]
    to_row, to_column, of_row, of_column = row[:, None], column[:, None], row[None], column[None]
    return second[:, to_column, to_row, of_row] * first[:, of_row, to_column, of_column]


def monarch_product(first: Tensor, second: Tensor, v: Tensor) -> Tensor:
    """The matrix of `monarch_matrix` times v (B, length, H, P), or (B, length, 1, P) for one of one head."""
    length, (rows, columns) = v.shape[1], first.shape[1:3]
    v = F.pad(v, (0, 0, 0, 0, 0, rows * columns - length)).unflatten(1, (rows, columns))
    v = torch.einsum("hred,brdhp->brehp", first, v)
    v = torch.einsum("hesr,brehp->bsehp", second, v)
    return v.flatten(1, 2)[:, :length]


@dataclass(frozen=True, kw_only=True, slots=True)
class ButterflyConfig(SharedBlockConfig):
    """Options of the butterfly mixer."""

    kaleidoscope: int = 0
    """Products B C^T of two butterflies each, whose product M is (arXiv 2012.14966); 0 = M is one butterfly."""


class Butterfly(MatrixMixer):
    """ceil(log2 N) factors, N = max_seqlen, of 2 x 2 blocks each: factor s mixes the tokens whose positions differ in
    bit s only. N is filled up with zeros to a power of two.

    `twiddle` (H, factors, pairs, 2, 2) holds the blocks of a factor by the lower position of the pair. With
    `kaleidoscope` the factors of all its butterflies stand one behind the other, as they are applied to the values:
    of every product first C, of which the transpose is taken: its last factor comes first, with transposed blocks.
    """

    Config = ButterflyConfig
    fixed_length = True
    complexity = "O(L log L)"

    @classmethod
    def check(cls, d_model: int, config: ButterflyConfig) -> None:
        super().check(d_model, config)
        cls.require_least(config, kaleidoscope=0)

    @staticmethod
    def factor_count(length: int) -> int:
        """ceil(log2 N), one at least."""
        return max(1, (length - 1).bit_length())

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        factors = self.factor_count(self.max_seqlen)
        butterflies = 2 * self.config.kaleidoscope or 1
        return {"twiddle": ((self.nheads, butterflies * factors, 2 ** (factors - 1), 2, 2), draw_rotations)}

    def butterflies(self) -> tuple[Tensor, ...]:
        """The factors of each butterfly, (H, factors, pairs, 2, 2)."""
        return weight_of(self.matrix_mixer, "twiddle").split(self.factor_count(self.max_seqlen), 1)

    def transposed(self, at: int) -> bool:
        """Whether the transpose of butterfly `at` is taken."""
        return self.config.kaleidoscope > 0 and at % 2 == 0

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: ButterflyConfig, seqlen: int) -> float:
        factors = cls.factor_count(seqlen)
        return 3.0 * d_inner * (2 * config.kaleidoscope or 1) * factors * 2**factors / seqlen

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        length = v.shape[1]
        matrices = (butterfly_matrix(factors, 2 ** factors.shape[1]) for factors in self.butterflies())
        matrices = (m.mT if self.transposed(at) else m for at, m in enumerate(matrices))
        product = functools.reduce(lambda product, m: m @ product, matrices)
        return product[:, :length, :length].unsqueeze(0)

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        length = v.shape[1]
        v = F.pad(v, (0, 0, 0, 0, 0, 2 ** self.factor_count(self.max_seqlen) - length))
        for at, butterfly in enumerate(self.butterflies()):
            factors = list(enumerate(butterfly.to(v.dtype).unbind(1)))
            if self.transposed(at):
                factors = [(s, blocks.mT) for s, blocks in reversed(factors)]
            for s, blocks in factors:
                v = mix_pairs(s, blocks, v)
        return v[:, :length]


def butterfly_matrix(twiddle: Tensor, length: int) -> Tensor:
    """The product (H, length, length) of factors (H, factors, pairs, 2, 2)."""
    # From token j to token i leads one way: factor s turns bit s of the position from that of j into that of i.
    of = torch.arange(length, device=twiddle.device).unsqueeze(0)
    to, product = of.mT, 1.0
    for s in range(twiddle.shape[1]):
        pair = ((of >> (s + 1)) << s) + (to & ((1 << s) - 1))
        product = product * twiddle[:, s, pair, (to >> s) & 1, (of >> s) & 1]
    return product


def mix_pairs(s: int, blocks: Tensor, v: Tensor) -> Tensor:
    """Factor s, of blocks (H, pairs, 2, 2), times v (B, 2 pairs, H, P)."""
    v = v.unflatten(1, (-1, 2, 2**s))  # (B, blocks of 2^(s+1) tokens, bit s, lower bits, H, P)
    # (1, blocks, bit s of the output, bit s of the input, lower bits, H, 1)
    weights = blocks.unflatten(1, (-1, 2**s)).permute(1, 3, 4, 2, 0)[None, ..., None]
    return (weights[:, :, :, 0] * v[:, :, :1] + weights[:, :, :, 1] * v[:, :, 1:]).flatten(1, 3)


def draw_rotations(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Every 2 x 2 block turns by a random angle: M is orthogonal, and no gradient fades on its way."""
    angle = torch.rand(shape[:-2], generator=generator) * (2 * math.pi)
    sine, cosine = angle.sin(), angle.cos()
    return torch.stack((cosine, -sine, sine, cosine), -1).view(shape)
