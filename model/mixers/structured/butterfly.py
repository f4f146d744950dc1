"""Products of sparse factors with fixed permutations between them: Monarch (arXiv 2204.00595, 2310.12109) and butterfly
(arXiv 1903.05895) matrices, in the shared block of the matrix mixers (arXiv 2407.09941)."""

import math

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

    @staticmethod
    def grid(length: int) -> tuple[int, int]:
        """Rows and columns."""
        rows = math.isqrt(length - 1) + 1
        return rows, -(-length // rows)

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        rows, columns = self.grid(self.max_seqlen)
        shapes = {"blkdiag1": (self.nheads, rows, columns, columns), "blkdiag2": (self.nheads, columns, rows, rows)}
        # Each factor keeps the size of what it mixes, on average.
        return {name: (shape, normal_init(shape[-1] ** -0.5)) for name, shape in shapes.items()}

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: SharedBlockConfig, seqlen: int) -> float:
        rows, columns = cls.grid(seqlen)
        return 2.0 * d_inner * (rows + columns) * rows * columns / seqlen

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        _, columns = self.grid(self.max_seqlen)
        position = torch.arange(v.shape[1], device=v.device)
        row, column = position // columns, position % columns
        to_row, to_column, of_row, of_column = row[:, None], column[:, None], row[None], column[None]
        first, second = weights_of(self.matrix_mixer, "blkdiag1", "blkdiag2")
        first, second = first[:, of_row, to_column, of_column], second[:, to_column, to_row, of_row]
        return (second * first).unsqueeze(0)

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        rows, columns = self.grid(self.max_seqlen)
        length = v.shape[1]
        v = F.pad(v, (0, 0, 0, 0, 0, rows * columns - length)).unflatten(1, (rows, columns))
        first, second = weights_of(self.matrix_mixer, "blkdiag1", "blkdiag2")
        v = torch.einsum("hred,brdhp->brehp", first, v)
        v = torch.einsum("hesr,brehp->bsehp", second, v)
        return v.flatten(1, 2)[:, :length]


class Butterfly(MatrixMixer):
    """ceil(log2 N) factors, N = max_seqlen, of 2 x 2 blocks each: factor s mixes the tokens whose positions differ in
    bit s only. N is filled up with zeros to a power of two.

    `twiddle` (H, factors, pairs, 2, 2) holds the blocks of a factor by the lower position of the pair.
    """

    fixed_length = True
    complexity = "O(L log L)"

    @staticmethod
    def factor_count(length: int) -> int:
        """ceil(log2 N), one at least."""
        return max(1, (length - 1).bit_length())

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        factors = self.factor_count(self.max_seqlen)
        return {"twiddle": ((self.nheads, factors, 2 ** (factors - 1), 2, 2), draw_rotations)}

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: SharedBlockConfig, seqlen: int) -> float:
        factors = cls.factor_count(seqlen)
        return 3.0 * d_inner * factors * 2**factors / seqlen

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        # From token j to token i leads one way: factor s turns bit s of the position from that of j into that of i.
        of = torch.arange(v.shape[1], device=v.device).unsqueeze(0)
        to = of.mT
        twiddle, product = weight_of(self.matrix_mixer, "twiddle"), 1.0
        for s in range(self.factor_count(self.max_seqlen)):
            pair = ((of >> (s + 1)) << s) + (to & ((1 << s) - 1))
            product = product * twiddle[:, s, pair, (to >> s) & 1, (of >> s) & 1]
        return product.unsqueeze(0)

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        factors, length = self.factor_count(self.max_seqlen), v.shape[1]
        v = F.pad(v, (0, 0, 0, 0, 0, 2**factors - length))
        for s, blocks in enumerate(weight_of(self.matrix_mixer, "twiddle").to(v.dtype).unbind(1)):
            v = v.unflatten(1, (-1, 2, 2**s))  # (B, blocks of 2^(s+1) tokens, bit s, lower bits, H, P)
            # (1, blocks, bit s of the output, bit s of the input, lower bits, H, 1)
            weights = blocks.unflatten(1, (-1, 2**s)).permute(1, 3, 4, 2, 0)[None, ..., None]
            v = (weights[:, :, :, 0] * v[:, :, :1] + weights[:, :, :, 1] * v[:, :, 1:]).flatten(1, 3)
        return v[:, :length]


def draw_rotations(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Every 2 x 2 block turns by a random angle: M is orthogonal, and no gradient fades on its way."""
    angle = torch.rand(shape[:-2], generator=generator) * (2 * math.pi)
    sine, cosine = angle.sin(), angle.cos()
    return torch.stack((cosine, -sine, sine, cosine), -1).view(shape)
