"""The options of a layer around a scan, and where its parts stand in the projection."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.semiseparable.form import ScanForm, ScanSide


class LayerForm(NamedTuple):
    """in_proj's output is [z | v, k and q of each direction | raw step sizes of each direction]."""

    heads: int
    headdim: int
    groups: int
    d_state: int
    directions: int
    """1: causal, with a causal convolution; 2: bidirectional, with a centred one."""
    shift: bool
    """Two directions: each one's output moves one token on in its own sense."""
    low: float
    """Step sizes are never below this."""
    high: float
    """Step sizes are never above this."""

    @property
    def inner(self) -> int:
        """Channels of z and of v."""
        return self.heads * self.headdim

    @property
    def group_width(self) -> int:
        """Channels of one k or q."""
        return self.groups * self.d_state

    @property
    def conv_width(self) -> int:
        """Channels that the convolution takes."""
        return self.inner + 2 * self.directions * self.group_width

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of z, of what the convolution takes, and of the step sizes."""
        return self.inner, self.conv_width, self.directions * self.heads

    @property
    def scan(self) -> ScanForm:
        return ScanForm(shift=self.shift and self.directions == 2)

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z (..., inner), the convolution's channels and the raw step sizes (..., directions nheads), all views."""
        z, mixed, raw = projected.split(self.widths, -1)
        return z, mixed, raw

    def values_and_vectors(self, mixed: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Of the convolution's output (..., conv_width): v (..., H, P), and q and k (..., groups, d_state) of each
        direction, all views."""
        v, *vectors = mixed.split([self.inner, *2 * self.directions * [self.group_width]], -1)
        k, q = ([x.unflatten(-1, (self.groups, self.d_state)) for x in vectors[i::2]] for i in (0, 1))
        return v.unflatten(-1, (self.heads, self.headdim)), q, k

    def sides(self, q: list[Tensor], k: list[Tensor], dt: Tensor, log_decay: Tensor, state: Tensor | None) -> tuple:
        """The directions of the scan, for dt and log_decay (batch, seqlen, directions, H)."""
        return tuple(
            ScanSide(q[i], k[i], log_decay[..., i, :], dt[..., i, :], state, i == 1) for i in range(self.directions)
        )

    def scan_states(self, initial_states: Tensor | None, documents: int) -> Tensor | None:
        """The state (documents, H, N, P) that both directions start from, of the parameter (H, P, N)."""
        if initial_states is None:
            return None
        return initial_states.transpose(1, 2).expand(documents, -1, -1, -1)


def exact_type(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)
