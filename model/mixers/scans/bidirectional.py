"""Bidirectional mixers from two causal ones: what Hydra is compared with (arXiv 2407.09941, section 4).

All of them are Hydra's layer but for how the two directions meet, and for A_log and dt_bias, of which each direction
has its own. With SS one semiseparable scan:

- bidirectional_add: SS_f(x) + flip SS_b(flip x). A token meets itself in both scans, so that the diagonal of M is
  c_f . b_f dt_f + c_b . b_b dt_b: it follows from what the rest of M is made of.
- bidirectional_mult: the product SS_f(x) * flip SS_b(flip x), channel by channel.
- bidirectional_concat: both, twice the channels, before the norm and the output projection.
- bidirectional_add_diagonal: add, plus a diagonal of its own, D_t = (W_D x)_t + d.
- bidirectional_add_shift: both scans shifted one token on in their own sense and then added: the diagonal is 0.

Hydra is shift and diagonal together. Only bidirectional_add_diagonal has a skip: Mamba's D x_t would be a diagonal
beside the scans, and whether M has one is what is compared.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from matmix.kernels import gated_norm, quasiseparable_scan, short_conv
from matmix.model.calls import weight_of
from matmix.model.mixers.scans.scan_block import BidirectionalScanBlock
from matmix.model.mixers.shared import conv_weights


class BidirectionalAdd(BidirectionalScanBlock):
    """in_proj -> [z | x B C of both directions | dt of both] -> conv + silu -> two scans, joined -> gated norm ->
    out_proj."""

    diagonal = "none"
    step_shape = (2,)
    shift = False

    joined: ClassVar[str] = "add"
    """How the directions meet: "add", "mult" or "concat"."""

    def parts(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        """The gate z (B, L, d_inner) and the tensors of the scan."""
        return self.scan_arguments(self.in_proj(x), cu_seqlens)

    def scan_arguments(
        self, projected: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        """As `parts`, from in_proj's output."""
        z, vbc, dt = projected.split([self.d_inner, self.conv_dim, 2 * self.nheads], -1)
        vbc = short_conv(vbc, *conv_weights(self.conv1d), activation="silu", cu_seqlens=cu_seqlens)
        v, *vectors = vbc.split([self.d_inner, *4 * [self.d_group]], -1)
        # Step sizes and decays in float32: bfloat16 would round the decay of long memories to 1.
        exact = torch.promote_types(dt.dtype, torch.float32)
        dt = F.softplus(dt.to(exact).unflatten(-1, (2, self.nheads)) + self.dt_bias.to(exact))
        log_decay = dt * -self.A_log.to(exact).exp()
        diagonal = self.fc_D(v).to(exact) + self.D.to(exact) if self.diagonal == "projected" else None
        return z, self.arguments(v, tuple(vectors), dt, log_decay, diagonal)

    def layer_options(self) -> dict[str, Any]:
        return {"shift": self.shift}

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None
    ) -> torch.Tensor:
        projected = self.in_proj(x)
        if self.joined == "add" and self.is_fused(projected):
            return self.out_proj(self.fused(projected, cu_seqlens))
        z, arguments = self.scan_arguments(projected, cu_seqlens)
        y = quasiseparable_scan(
            **arguments,
            shift=self.shift,
            combine=self.joined,
            cu_seqlens=cu_seqlens,
            chunk_size=self.config.chunk_size or None,
        )
        return self.finish(y, z)

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.out_proj(gated_norm(y.flatten(-2), weight_of(self.norm), z, eps=self.norm.eps))


class BidirectionalAddDiagonal(BidirectionalAdd):
    """The sum of both scans and a free diagonal."""

    diagonal = "projected"


class BidirectionalAddShift(BidirectionalAdd):
    """The sum of both scans, each shifted by one token; no diagonal."""

    shift = True


class BidirectionalMult(BidirectionalAdd):
    """The product of both scans: quadratic in the values, so that there is a matrix for each direction.

    At the start the products of default sizes (7e-5) lie below the root of the norm's epsilon (3e-3), and the layer's
    outputs are small. The products grow with up to the eighth power of the inputs, and the norm squares them in
    float32: from 1e19 on, which inputs of 1e4 to 1e5 reach, outputs are 0 and then NaN. Give it normalised inputs.
    """

    joined = "mult"

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 2 H, L, L): those of the forward heads, then those of the backward heads."""
        return torch.cat(self.direction_matrices(x), dim=1)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, 2 H, P): the same for both directions."""
        return super().values(x).repeat(1, 1, 2, 1)

    def mix(self, matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        forward, backward = super().mix(matrix, values).chunk(2, dim=2)
        return forward * backward


class BidirectionalConcat(BidirectionalAdd):
    """Both scans side by side; the gate z is that of both halves."""

    joined = "concat"

    @classmethod
    def joined_width(cls, d_inner: int) -> int:
        return 2 * d_inner

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 2 H, L, L): those of the forward heads, then those of the backward heads."""
        return torch.cat(self.direction_matrices(x), dim=1)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, 2 H, P): the same for both directions."""
        return super().values(x).repeat(1, 1, 2, 1)

    def mix(self, matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """As the scan gives it, (B, L, H, 2 P): in each head the forward half, then the backward half."""
        return torch.cat(super().mix(matrix, values).chunk(2, dim=2), dim=-1)

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        gate = z.unflatten(-1, (self.nheads, -1)).repeat(1, 1, 1, 2)
        return super().finish(y, gate.flatten(-2))
