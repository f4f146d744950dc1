"""Shapes and tiles of one pass of a scan, and the arguments of its kernels."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from matmix.kernels.launching import dot_precision, rows_in_place
from matmix.kernels.semiseparable.form import ScanForm, ScanSide
from matmix.kernels.semiseparable.fused.configs import ScanConfig, choose
from matmix.kernels.slots import count_documents, count_slots

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
        return count_documents(self.rows, self.cu_seqlens)

    def per_row(self, span: int) -> int:
        return -(-self.seqlen // span)

    def slots(self, span: int) -> int:
        return count_slots(self.rows, self.seqlen, self.cu_seqlens, span)


def set_up(v: Tensor, q: Tensor, cu_seqlens: Tensor | None, chunk_size: int | None, backward: bool) -> Scan:
    rows, seqlen, heads, headdim = v.shape
    groups, d_state = q.shape[2:]
    config = choose(v.dtype, seqlen, chunk_size)
    chunk = config.backward_chunk if backward else config.forward_chunk
    return Scan(
        rows, seqlen, heads, headdim, groups, d_state, cu_seqlens, config, chunk, dot_precision(v.dtype), PROGRAMS
    )  # fmt: skip


def per_token(x: Tensor | None) -> tuple:
    """A (batch, seqlen, nheads) or (nheads,) factor as a pointer and three strides."""
    if x is None:
        return None, 0, 0, 0
    return (x, 0, 0, x.stride(0)) if x.dim() == 1 else (x, *x.stride())


def readable(side: ScanSide) -> ScanSide:
    return side._replace(q=rows_in_place(side.q), k=rows_in_place(side.k))


def one_or_two(sides: tuple[ScanSide, ...], form: ScanForm) -> tuple[ScanSide, ScanSide, float]:
    """Two directions for kernels that take two, the second empty where there is one, and the weight of their own
    terms."""
    if len(sides) == 1:
        return sides[0], sides[0]._replace(log_decay=None, input_scale=None), 1.0
    return *sides, 0.5 if form.self_term == "mean" else 1.0
