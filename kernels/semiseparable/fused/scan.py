"""Shapes and tiles of one pass of a scan, and the arguments of its kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from matmix.kernels.launching import dot_precision, launch, rows_in_place
from matmix.kernels.semiseparable.form import ScanForm, ScanSide
from matmix.kernels.semiseparable.fused.configs import ScanConfig, choose
from matmix.kernels.semiseparable.fused.sums import decay_sums
from matmix.kernels.slots import count_documents, count_slots, slot_table
from matmix.kernels.tiles.table import architecture

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

    def table(self, span: int) -> Tensor | None:
        return slot_table(self.rows, self.seqlen, self.cu_seqlens, span)

    @property
    def tile(self) -> int:
        return self.config.tile

    @property
    def tiles(self) -> int:
        """Tiles of all chunks."""
        return self.slots(self.chunk) * (self.chunk // self.tile)

    def heads_at_once(self, most: int) -> int:
        """Heads of a group for one program: as many as may be that share evenly and leave enough programs."""
        most = min(most, max(1, self.tiles * self.heads // self.programs))
        return max(d for d in range(1, self.share + 1) if self.share % d == 0 and d <= most)

    @property
    def whole(self) -> bool:
        """Whether all chunks are full, so that no token has to be looked for."""
        return self.cu_seqlens is None and self.seqlen % self.chunk == 0

    @property
    def walks(self) -> bool:
        """Whether one program can make all tiles of a document for one head, and there are enough of those."""
        _, n_blocks, _, p_blocks = self.blocks(self.config.block)
        enough = self.documents * self.heads * p_blocks >= self.programs
        return self.config.walk and enough and n_blocks == 1 and self.seqlen > self.chunk

    @property
    def exact(self) -> bool:
        """Whether sums of decays are two floats."""
        return self.config.itemsize == 4

    def factors(self, sides: tuple[ScanSide, ...]) -> int:
        """Rows of the table of sums for each slot, head and direction."""
        gated = any(side.log_decay is not None for side in sides)
        return (2 if self.exact else 1) if gated else 0


def set_up(v: Tensor, q: Tensor, cu_seqlens: Tensor | None, chunk_size: int | None, backward: bool) -> Scan:
    rows, seqlen, heads, headdim = v.shape
    groups, d_state = q.shape[2:]
    config = choose(v.dtype, seqlen, chunk_size, architecture(v.device))
    chunk = config.backward_chunk if backward else config.forward_chunk
    if backward and chunk > 2 * config.tile:
        # Gradients are found for one or two tiles of a chunk; one block of so many warps may have all registers.
        tile = chunk // 2
        config = config._replace(
            tile=tile, pair_warps=max(config.pair_warps, tile // 16), pair_registers=255,
            vector_warps=max(config.vector_warps, tile // 16), vector_registers=255,
        )  # fmt: skip
    return Scan(
        rows, seqlen, heads, headdim, groups, d_state, cu_seqlens, config, chunk, dot_precision(v.dtype), PROGRAMS
    )  # fmt: skip


def sum_decays(scan: Scan, sides: tuple[ScanSide, ...], triangle: Tensor | None = None) -> Tensor | None:
    """(slots, nheads, directions, factors, chunk) float32, what `decay_sums` stores, with room around it; None without
    any decay. `triangle` (tile, tile), if given, becomes 1 below its diagonal and else 0."""
    factors = scan.factors(sides)
    if not factors:
        return None
    first, second = sides[0], sides[1] if len(sides) == 2 else sides[0]._replace(log_decay=None)
    device = sides[0].q.device
    slots = scan.slots(scan.chunk)
    room = 16
    size = slots * scan.heads * len(sides) * factors * scan.chunk
    sums = torch.empty(size + 2 * room, dtype=torch.float32, device=device)[room:]
    block = heads_of_warp(scan.heads, scan.chunk, 1024)
    tile = 0 if triangle is None else triangle.shape[0]
    launch(
        decay_sums, (slots + (triangle is not None), triton.cdiv(scan.heads, block)),
        sums, triangle, *per_token(first.log_decay), *per_token(second.log_decay),
        scan.table(scan.chunk), scan.seqlen, scan.per_row(scan.chunk), scan.heads, tile, num_warps=1, num_stages=1,
        TWO=len(sides) == 2, REVERSE=first.reverse, GATED1=first.log_decay is not None,
        GATED2=second.log_decay is not None, PACKED=scan.cu_seqlens is not None, CHUNK=scan.chunk, FACTORS=factors,
        BLOCK_H=block, EXACT=scan.exact, TILE=tile,
    )  # fmt: skip
    return sums


def heads_of_warp(heads: int, chunk: int, numbers: int) -> int:
    """Heads that a program of one warp takes together, which looks at so many numbers of each kind: of all tokens of a
    chunk."""
    return min(max(1, numbers // chunk), triton.next_power_of_2(heads))


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
