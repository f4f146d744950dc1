"""Bidirectional mixers from two causal ones: what Hydra is compared with (arXiv 2407.09941, section 4).

All but `TwoSSMs` and `TwoS6`, which share no more than an output projection, are Hydra's layer but for how the two
directions meet, and for A_log and dt_bias, of which each direction has its own. Hydra is shift and diagonal together.
Of these only `BidirectionalAddDiagonal` has a skip: Mamba's D x_t would be a diagonal beside the scans, and whether M
has one is what is compared.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from matmix.kernels.scan_layer.chunked import both_halves
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.scans.s6 import S6, S6Config
from matmix.model.mixers.scans.scan_block import BidirectionalScanBlock
from matmix.model.mixers.scans.semiseparable import Semiseparable, SemiseparableConfig


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoSSMsConfig(SemiseparableConfig):
    """Options of two state-space layers, one from either end."""

    joined: Literal["add", "mult", "concat"] = "add"
    """How their outputs meet before the output projection, which is twice as wide for "concat"."""


def on_both_sides(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names in `TwoSSMs` of parameters of its layers."""
    return tuple(f"ssms.{side}.{name}" for side in (0, 1) for name in names)


class TwoSSMs(Mixer):
    """Two of Mamba-2's layers that share no input processing: each has an input projection, a causal convolution, a
    gate and a norm of its own, and one of them reads the documents from their ends.

    With "concat" the projection is that of each layer beside the other's: two whole layers whose outputs are added.
    """

    Config = TwoSSMsConfig
    kind: ClassVar[type[Mixer]] = Semiseparable
    """The class of the layers; `Config` has its options."""
    bidirectional_form = True
    rank_option = "d_state"
    not_decayed = on_both_sides(Semiseparable.not_decayed)

    def __init__(self, d_model: int, config: Any, **options):
        super().__init__(d_model, config, **options)
        self.ssms = nn.ModuleList(self.kind(d_model, config, **options | {"causal": True}) for _ in range(2))
        self.nheads = self.ssms[0].nheads
        for ssm in self.ssms:
            ssm.out_proj = nn.Identity()
        width = config.expand * d_model * (2 if config.joined == "concat" else 1)
        self.out_proj = nn.Linear(width, d_model, bias=config.bias)

    def blocks(self) -> dict[str, tuple[int, ...]]:
        return {f"ssms.{side}.{name}": rows for side in (0, 1) for name, rows in self.ssms[side].blocks().items()}

    @classmethod
    def check(cls, d_model: int, config: Any) -> None:
        super().check(d_model, config)
        type(cls.kind.__name__, (cls.kind,), {"name": cls.name}).check(d_model, config)  # its errors name this mixer

    @classmethod
    def halo(cls, config: Any) -> int:
        return config.d_conv - 1

    @classmethod
    def mixing_flops(cls, d_model: int, config: Any, seqlen: int, causal: bool) -> float:
        return 2 * cls.kind.mixing_flops(d_model, config, seqlen, causal)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        mirrored = None if cu_seqlens is None else cu_seqlens[-1] - cu_seqlens.flip(0)
        forward, backward = self.ssms
        return self.join(forward(x, cu_seqlens, max_seqlen), backward(x.flip(1), mirrored, max_seqlen).flip(1))

    def join(self, forward: Tensor, backward: Tensor) -> Tensor:
        """The layer's output from those of the two, (B, L, d_inner)."""
        if self.config.joined == "concat":
            return self.out_proj(torch.cat([forward, backward], -1))
        return self.out_proj(forward + backward if self.config.joined == "add" else forward * backward)

    def matrix(self, x: Tensor) -> Tensor:
        """(B, 2 H, L, L): those of the forward heads, then those of the backward heads."""
        forward, backward = self.ssms
        return torch.cat([forward.matrix(x), backward.matrix(x.flip(1)).flip(-1, -2)], 1)

    def values(self, x: Tensor) -> Tensor:
        """(B, L, 2 H, P): those of the forward heads, then those of the backward heads."""
        forward, backward = self.ssms
        return torch.cat([forward.values(x), backward.values(x.flip(1)).flip(1)], 2)

    def combine(self, mixed: Tensor, x: Tensor) -> Tensor:
        first, last = mixed.chunk(2, dim=2)
        forward, backward = self.ssms
        return self.join(forward.combine(first, x), backward.combine(last.flip(1), x.flip(1)).flip(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoS6Config(S6Config):
    """Options of two layers of Mamba-1, one from either end."""

    joined: Literal["add", "mult", "concat"] = "add"
    """How their outputs meet before the output projection, which is twice as wide for "concat"."""


class TwoS6(TwoSSMs):
    """`TwoSSMs` with Mamba-1's layers."""

    Config = TwoS6Config
    kind = S6
    not_decayed = on_both_sides(S6.not_decayed)
