"""Shapes and tiles of one pass of a scan, and how its tensors are handed to kernels."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from matmix.kernels.launching import dot_precision
from matmix.kernels.semiseparable.form import ScanSide
from matmix.kernels.semiseparable.fused.configs import ScanConfig, choose

PROGRAMS = 512
"""Programs that keep any present GPU busy; fewer are not cut any finer than needed to reach it."""


class Scan(NamedTuple):
    """Shapes and choices of one pass."""

    rows: int
    """Batch rows."""
    seqlen: int
    heads: int
    headdim: int
    groups: int
    d_state: int
    cu_seqlens: Tensor | None
    config: ScanConfig
    chunk: int
    precision: str
    programs: int
    """Programs to aim for (PROGRAMS)."""

    def blocks(self, block: int) -> tuple[int, int, int, int]:
        """Tiles of at most `block` elements: width and number over d_state, then over headdim."""
        n, p = (min(block, max(16, triton.next_power_of_2(width))) for width in (self.d_state, self.headdim))
        return n, -(-self.d_state // n), p, -(-self.headdim // p)

    @property
    def share(self) -> int:
        """Heads of a group."""
        return self.heads // self.groups

    @property
    def documents(self) -> int:
        return self.rows if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def per_row(self, span: int) -> int:
        return -(-self.seqlen // span)

    def slots(self, span: int) -> int:
        """Pieces of `span` tokens, or a bound of their number where documents are packed (see layout.py)."""
        if self.cu_seqlens is None:
            return self.rows * self.per_row(span)
        return self.seqlen // span + self.documents


def set_up(v: Tensor, q: Tensor, cu_seqlens: Tensor | None, chunk_size: int | None, backward: bool) -> Scan:
    rows, seqlen, heads, headdim = v.shape
    groups, d_state = q.shape[2:]
    config = choose(v.dtype, seqlen, chunk_size)
    chunk = config.backward_chunk if backward else config.forward_chunk
    return Scan(
        rows, seqlen, heads, headdim, groups, d_state, cu_seqlens, config, chunk, dot_precision(v.dtype), PROGRAMS
    )  # fmt: skip


def vectors_of(x: Tensor) -> Tensor:
    """Rows that can be read as they lie: any strides but the last."""
    return x if x.stride(-1) == 1 else x.contiguous()


def per_token(x: Tensor | None) -> tuple:
    """A (batch, seqlen, nheads) or (nheads,) factor as a pointer and three strides."""
    if x is None:
        return None, 0, 0, 0
    return (x, 0, 0, x.stride(0)) if x.dim() == 1 else (x, *x.stride())


def readable(side: ScanSide) -> ScanSide:
    return side._replace(q=vectors_of(side.q), k=vectors_of(side.k))
