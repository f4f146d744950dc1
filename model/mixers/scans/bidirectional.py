"""Bidirectional mixers from two causal ones: what Hydra is compared with (arXiv 2407.09941, section 4).

All of them are Hydra's layer but for how the two directions meet, and for A_log and dt_bias, of which each direction
has its own. Hydra is shift and diagonal together. Only `BidirectionalAddDiagonal` has a skip: Mamba's D x_t would be a
diagonal beside the scans, and whether M has one is what is compared.
"""

import torch
from torch import Tensor

from matmix.kernels.scan_layer.chunked import both_halves
from matmix.model.mixers.scans.scan_block import BidirectionalScanBlock


class BidirectionalAdd(BidirectionalScanBlock):
    """SS_f(x) + flip SS_b(flip x), SS one semiseparable scan. A token meets itself in both, so that the diagonal of M,
    c_f . b_f dt_f + c_b . b_b dt_b, follows from what the rest of M is made of."""

    diagonal = "none"
    step_shape = (2,)


class BidirectionalAddDiagonal(BidirectionalAdd):
    """The sum of both scans and a free diagonal, D_t = (W_D x)_t + d."""

    diagonal = "projected"


class BidirectionalAddShift(BidirectionalAdd):
    """The sum of both scans, each shifted by one token in its own sense: the diagonal is 0."""

    shift = True


class SeparateDirections(BidirectionalAdd):
    """Directions that are not added, so that there is a matrix for each of them."""

    def matrix(self, x: Tensor) -> Tensor:
        """(B, 2 H, L, L): those of the forward heads, then those of the backward heads."""
        return torch.cat(self.direction_matrices(x), dim=1)

    def values(self, x: Tensor) -> Tensor:
        """(B, L, 2 H, P): the same for both directions."""
        return super().values(x).repeat(1, 1, 2, 1)


class BidirectionalMult(SeparateDirections):
    """The product of both scans: quadratic in the values, so that there is a matrix for each direction.

    At the start the products of default sizes (7e-5) lie below the root of the norm's epsilon (3e-3), and the layer's
    outputs are small. The products grow with up to the eighth power of the inputs, and the norm squares them in
    float32: from 1e19 on, which inputs of 1e4 to 1e5 reach, outputs are 0 and then NaN. Give it normalised inputs.
    """

    joined = "mult"

    def mix(self, matrix: Tensor, values: Tensor) -> Tensor:
        forward, backward = super().mix(matrix, values).chunk(2, dim=2)
        return forward * backward


class BidirectionalConcat(SeparateDirections):
    """Both scans side by side, before the norm and the output projection; the gate z is that of both halves."""

    joined = "concat"

    def mix(self, matrix: Tensor, values: Tensor) -> Tensor:
        """Returns M f(x) as the scan does, (B, L, H, 2 P): in each head the forward half, then the backward half."""
        return torch.cat(super().mix(matrix, values).chunk(2, dim=2), dim=-1)

    def finish(self, y: Tensor, z: Tensor) -> Tensor:
        return super().finish(y, both_halves(z, self.nheads))
