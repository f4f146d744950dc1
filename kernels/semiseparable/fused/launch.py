"""The Triton form of the scans: which kernels run on what, for forward and backward passes.

Nothing here looks at values on the device or waits for it, so that both passes can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from matmix.kernels.launching import dot_precision, launch
from matmix.kernels.semiseparable.form import ScanForm, ScanOutput, SideGradients
from matmix.kernels.semiseparable.fused.configs import ScanConfig, choose, configurations, force_configuration
from matmix.kernels.semiseparable.fused.gradients import pair_gradients, state_gradients
from matmix.kernels.semiseparable.fused.mix import mix
from matmix.kernels.semiseparable.fused.states import combine_spans, state_pass
from matmix.kernels.semiseparable.setup import ScanSide, reduce_like

__all__ = ["backward", "configurations", "force_configuration", "forward"]

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
        rows, seqlen, heads, headdim, groups, d_state, cu_seqlens, config, chunk, dot_precision(v.dtype)
    )  # fmt: skip


def vectors_of(x: Tensor) -> Tensor:
    """Rows that can be read as they lie: any strides but the last."""
    return x if x.stride(-1) == 1 else x.contiguous()


def per_token(x: Tensor | None) -> tuple:
    """A (batch, seqlen, nheads) or (nheads,) factor as a pointer and three strides."""
    if x is None:
        return None, 0, 0, 0
    return (x, 0, 0, x.stride(0)) if x.dim() == 1 else (x, *x.stride())


class States(NamedTuple):
    """States of all directions at chunk edges."""

    states: Tensor | None
    """(slots, nheads, directions, d_state, headdim)."""
    vectors: Tensor | None
    """(slots, nheads, directions, d_state) float32: the same for the sums over rows."""
    ends: Tensor | None
    """(documents, nheads, directions, d_state, headdim) float32: behind the last chunk, where asked for."""


def pass_states(
    scan: Scan,
    like: Tensor,
    sides: tuple[ScanSide, ...],
    keys: list[Tensor],
    values: list[Tensor],
    initial: list[Tensor | None],
    form: ScanForm,
    *,
    cotangent: bool,
    sum_factor: Tensor | None = None,
    want_ends: bool = False,
    store: bool = True,
) -> States:
    """States that enter the chunks; with `cotangent`, the cotangents of the states that leave them."""
    count, device, vector = len(sides), like.device, form.normalize
    documents, heads, n, p = scan.documents, scan.heads, scan.d_state, scan.headdim

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    slots = scan.slots(scan.chunk)
    # float16 could not hold what long documents add up to.
    held = torch.bfloat16 if like.dtype == torch.bfloat16 else torch.float32
    states = empty(slots, heads, count, n, p, dtype=held) if store else None
    vectors = empty(slots, heads, count, n) if store and vector else None
    entry = None
    if any(state is not None for state in initial):
        zero = torch.zeros(documents, heads, n, p, device=device) if None in initial else None
        entry = torch.stack([(zero if state is None else state).float() for state in initial], 2)
    ends = empty(documents, heads, count, n, p) if want_ends else None

    block_n, n_blocks, block_p, p_blocks = scan.blocks(scan.config.block)
    tiles = n_blocks * p_blocks
    programs = documents * heads * tiles
    chunks = scan.per_row(scan.chunk)
    span = max(8, -(-scan.rows * chunks * heads * tiles // PROGRAMS))
    split = programs < PROGRAMS // 2 and chunks >= 4 * span
    if not split:
        span = max(chunks, 1)
    units = scan.slots(span * scan.chunk) if split else documents
    per_row = scan.per_row(span * scan.chunk) if split else 1
    if not split and scan.cu_seqlens is not None:
        # Spans longer than the row: every document is one unit, numbered like the documents.
        span = scan.seqlen // scan.chunk + 1
    span_ends = empty(units, heads, count, n, p) if split else None
    span_vectors = empty(units, heads, count, n) if split and vector else None
    span_decays = empty(units, heads, count) if split else None

    def run(number: int, entries: Tensor | None, entry_vectors: Tensor | None, out: Tensor | None, summing: bool):
        side, key, value = sides[number], keys[number], values[number]
        scale = None if cotangent else side.input_scale
        launch(
            state_pass, (units, heads, tiles),
            key, key.stride(0), key.stride(1), key.stride(2), value, value.stride(0), value.stride(1), value.stride(2),
            *per_token(side.log_decay), *per_token(scale), *per_token(sum_factor),
            None if summing else states, None if summing else vectors, entries, entry_vectors, out,
            span_vectors if summing else None, span_decays if summing else None,
            scan.cu_seqlens, documents, scan.seqlen, scan.per_row(scan.chunk), per_row, span, heads,
            scan.share, n, p, number,
            num_warps=scan.config.state_warps, num_stages=scan.config.stages,
            directions=count, REVERSE=side.reverse != cotangent, COTANGENT=cotangent, SHIFT=form.shift,
            GATED=side.log_decay is not None, SCALED=scale is not None, STORE=store and not summing, VECTOR=vector,
            ENTRY=entries is not None, END=out is not None, DECAYS=summing, PACKED=scan.cu_seqlens is not None,
            CHUNK=scan.chunk, BLOCK_N=block_n, BLOCK_P=block_p, PRECISION=scan.precision,
        )  # fmt: skip

    for number, side in enumerate(sides):
        if not split:
            run(number, entry, None, ends, False)
            continue
        run(number, None, None, span_ends, True)
        for of_span, first, last in ((span_ends, entry, ends), (span_vectors, None, None)):
            if of_span is not None:
                elements = of_span[0, 0, 0].numel()
                block = min(1024, triton.next_power_of_2(elements))
                launch(
                    combine_spans, (documents, heads, -(-elements // block)),
                    of_span, span_decays, first, last, scan.cu_seqlens, scan.seqlen, per_row, span * scan.chunk,
                    heads, elements, number, num_warps=4,
                    directions=count, REVERSE=side.reverse != cotangent, INITIAL=first is not None,
                    FINAL=last is not None, PACKED=scan.cu_seqlens is not None, BLOCK=block,
                )  # fmt: skip
        if store:
            run(number, span_ends, span_vectors, None, False)
    return States(states, vectors, ends)


def product(
    scan: Scan,
    y: Tensor,
    row_sums: Tensor | None,
    rest: Tensor | None,
    values: list[Tensor],
    sides: tuple[ScanSide, ...],
    diagonal: Tensor | None,
    form: ScanForm,
    states: States | None,
    transposed: bool,
) -> None:
    """Write M v, or M^T applied to cotangents, into y."""
    two = len(sides) == 2
    arguments: list = []
    for side in (*sides, *sides)[:2] if two else (sides[0], sides[0]):
        row, col = (side.k, side.q) if transposed else (side.q, side.k)
        arguments += [row, *row.stride()[:3], col, *col.stride()[:3]]
    first, second = sides[0], sides[1] if two else sides[0]._replace(log_decay=None, input_scale=None)
    heads = math.gcd(scan.config.heads, scan.share)
    while heads > 1 and scan.slots(scan.chunk) * (scan.chunk // scan.config.rows) * scan.heads // heads < PROGRAMS:
        heads = max(d for d in range(1, heads) if heads % d == 0)
    rows = min(scan.config.rows, scan.chunk)
    block_n, n_blocks, block_p, p_blocks = scan.blocks(scan.config.block)
    launch(
        mix, (scan.slots(scan.chunk) * (scan.chunk // rows), scan.heads // heads, p_blocks),
        y, *y.stride()[:3], row_sums, rest, values[0], values[-1], *values[0].stride()[:3], *arguments,
        *per_token(first.log_decay), *per_token(second.log_decay),
        *per_token(first.input_scale), *per_token(second.input_scale), *per_token(diagonal),
        None if states is None else states.states, None if states is None else states.vectors,
        scan.cu_seqlens, scan.documents, scan.seqlen, scan.per_row(scan.chunk), scan.heads, scan.share, scan.d_state,
        scan.headdim, 0.5 if two and form.self_term == "mean" else 1.0, form.eps,
        num_warps=scan.config.mix_warps, num_stages=scan.config.stages,
        TWO=two, REVERSE=first.reverse, TRANSPOSED=transposed, SHIFT=form.shift, GATED1=first.log_decay is not None,
        GATED2=second.log_decay is not None, SCALED1=first.input_scale is not None,
        SCALED2=second.input_scale is not None, DIAGONAL=diagonal is not None, CARRIED=states is not None,
        NORMALIZE=row_sums is not None, REST=rest is not None, COMBINE=form.combine if two else "add",
        PACKED=scan.cu_seqlens is not None, CHUNK=scan.chunk, ROWS=rows, HEADS=heads, BLOCK_N=block_n,
        N_BLOCKS=n_blocks, BLOCK_P=block_p, PRECISION=scan.precision, EXACT=scan.config.itemsize == 4,
    )  # fmt: skip


def readable(side: ScanSide) -> ScanSide:
    return side._replace(q=vectors_of(side.q), k=vectors_of(side.k))


def forward(
    v: Tensor,
    sides: tuple[ScanSide, ...],
    diagonal: Tensor | None,
    form: ScanForm,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    final_state: bool,
) -> ScanOutput:
    """See `scan_forward` of the PyTorch form."""
    scan = set_up(v, sides[0].q, cu_seqlens, chunk_size, False)
    v, sides = vectors_of(v), tuple(map(readable, sides))
    initial = [side.initial_state for side in sides]
    carried = scan.seqlen > scan.chunk or any(state is not None for state in initial)
    states = None
    if carried or final_state:
        states = pass_states(
            scan, v, sides, [side.k for side in sides], [v] * len(sides), initial, form,
            cotangent=False, want_ends=final_state, store=carried,
        )  # fmt: skip
    concat = form.combine == "concat" and len(sides) == 2
    y = torch.empty(*v.shape[:3], scan.headdim * (2 if concat else 1), dtype=v.dtype, device=v.device)
    row_sums = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device) if form.normalize else None
    rest = torch.empty_like(y) if form.normalize and v.itemsize < 4 else None
    product(scan, y, row_sums, rest, [v], sides, diagonal, form, states if carried else None, False)
    return ScanOutput(y, row_sums, states.ends[:, :, 0] if final_state else None, rest)


def backward(
    dy: Tensor,
    drow_sum: Tensor | None,
    dfinal: Tensor | None,
    v: Tensor,
    sides: tuple[ScanSide, ...],
    diagonal: Tensor | None,
    form: ScanForm,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, tuple[SideGradients, ...], Tensor | None]:
    """See `scan_backward` of the PyTorch form."""
    scan = set_up(v, sides[0].q, cu_seqlens, chunk_size, True)
    # The scan is linear here; states need sums of rows where the cotangent of those is given.
    form, given = form._replace(normalize=drow_sum is not None), sides
    v, sides, dy = vectors_of(v), tuple(map(readable, sides)), vectors_of(dy)
    count, p = len(sides), scan.headdim
    parts = [dy[..., :p], dy[..., p:]] if form.combine == "concat" and count == 2 else [dy] * count
    initial = [side.initial_state for side in sides]
    starts = any(state is not None for state in initial)
    carried = scan.seqlen > scan.chunk or starts or dfinal is not None
    entering = leaving = None
    if carried:
        entering = pass_states(scan, v, sides, [side.k for side in sides], [v] * count, initial, form, cotangent=False)
        leaving = pass_states(
            scan, v, sides, [side.q for side in sides], parts, [dfinal, *[None] * (count - 1)], form,
            cotangent=True, sum_factor=drow_sum, want_ends=starts,
        )  # fmt: skip
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    product(scan, dv, None, None, parts, sides, diagonal, form, leaving, True)

    gradients, along = vector_gradients(scan, v, parts, drow_sum, sides, diagonal is not None, form, entering, leaving)
    finished = []
    for number, (side, (dq, dk, da, dw)) in enumerate(zip(given, gradients, strict=True)):
        initial = None
        if side.initial_state is not None:
            # Copied: of one document and head the slice is contiguous as it is, and outputs of an op share no memory.
            ends = leaving.ends[:, :, number]
            initial = ends.to(side.initial_state.dtype, copy=True, memory_format=torch.contiguous_format)
        da = None if da is None else reduce_like(da, side.log_decay)
        dw = None if dw is None else dw.to(side.input_scale.dtype)
        finished.append(SideGradients(dq, dk, da, dw, initial))
    return dv, tuple(finished), None if diagonal is None else reduce_like(along, diagonal)


def vector_gradients(
    scan: Scan,
    v: Tensor,
    dys: list[Tensor],
    drow_sum: Tensor | None,
    sides: tuple[ScanSide, ...],
    diagonal: bool,
    form: ScanForm,
    entering: States | None,
    leaving: States | None,
) -> tuple[list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]], Tensor | None]:
    """For each direction gradients of q, k (as they are), log-decays and input scales (float32, per token and head);
    and dy . v per token and head where there is a diagonal."""
    two, carried, slots = len(sides) == 2, entering is not None, scan.slots(scan.chunk)
    first, second = sides[0], sides[1] if two else sides[0]._replace(log_decay=None, input_scale=None)
    # Heads in one program share the last products; fewer of them where that would leave the GPU idle.
    wanted = max(1, slots * scan.heads // PROGRAMS)
    heads = max(d for d in range(1, scan.share + 1) if scan.share % d == 0 and d <= wanted)
    blocks = scan.share // heads
    add = carried and blocks == 1
    shape, factors = first.q.shape, v.shape[:3]

    def vectors(parts: int, dtype: torch.dtype, zero: bool) -> Tensor:
        # With shift nobody reads for a document's last (or first) token.
        return (torch.zeros if zero else torch.empty)((parts, *shape), dtype=dtype, device=v.device)

    def factor(wanted: bool, parts: int = 1) -> Tensor | None:
        return torch.empty((parts, *factors), dtype=torch.float32, device=v.device) if wanted else None

    parts = blocks * (2 if carried and not add else 1)
    pair_dtype = v.dtype if parts == 1 and not carried else torch.float32
    dqs = [vectors(parts, pair_dtype, form.shift and not add) for _ in sides]
    dks = [vectors(parts, pair_dtype, False) for _ in sides]
    das = [factor(side.log_decay is not None) for side in (first, second)]
    dws = [factor(side.input_scale is not None) for side in (first, second)]
    halves = two and form.combine == "concat"
    along, along2 = factor(diagonal), factor(diagonal and halves)
    self_weight = 0.5 if two and form.self_term == "mean" else 1.0
    block_n, n_blocks, block_p, p_blocks = scan.blocks(scan.config.pair_block)
    launch(
        pair_gradients, (slots, scan.heads // heads),
        dqs[0], dks[0], dqs[-1], dks[-1], *dqs[0].stride()[:4], das[0], dws[0], das[1], dws[1], along, along2,
        dys[0], dys[-1], *dys[0].stride()[:3], v, *v.stride()[:3],
        first.q, *first.q.stride()[:3], first.k, *first.k.stride()[:3],
        second.q, *second.q.stride()[:3], second.k, *second.k.stride()[:3],
        *per_token(first.log_decay), *per_token(second.log_decay),
        *per_token(first.input_scale), *per_token(second.input_scale), *per_token(drow_sum),
        scan.cu_seqlens, scan.documents, scan.seqlen, scan.per_row(scan.chunk), scan.heads, scan.share, scan.d_state,
        scan.headdim, self_weight,
        num_warps=scan.config.pair_warps, num_stages=scan.config.stages,
        TWO=two, REVERSE=first.reverse, SHIFT=form.shift, GATED1=das[0] is not None, GATED2=das[1] is not None,
        SCALED1=dws[0] is not None, SCALED2=dws[1] is not None, DIAGONAL=diagonal, HALVES=halves,
        NORMALIZE=drow_sum is not None, PACKED=scan.cu_seqlens is not None, CHUNK=scan.chunk, HEADS=heads,
        BLOCK_N=block_n, N_BLOCKS=n_blocks, BLOCK_P=block_p, P_BLOCKS=p_blocks,
        PRECISION=scan.precision, EXACT=scan.config.itemsize == 4,
    )  # fmt: skip

    found = []
    block_n, n_blocks, block_p, p_blocks = scan.blocks(scan.config.state_gradient_block)
    for number, side in enumerate(sides):
        dq, dk, da, dw = dqs[number], dks[number], das[number], dws[number]
        if carried:
            into_q = vectors(1, v.dtype, form.shift) if add else dq[blocks:]
            into_k = vectors(1, v.dtype, False) if add else dk[blocks:]
            into_a, into_w = factor(da is not None, n_blocks), factor(dw is not None, n_blocks)
            launch(
                state_gradients, (slots, scan.heads // heads, n_blocks),
                into_q, into_k, *into_q.stride()[:4], dq if add else None, dk if add else None,
                into_a, into_w, factors.numel(), da, dw,
                dys[number], *dys[number].stride()[:3], v, *v.stride()[:3],
                side.q, *side.q.stride()[:3], side.k, *side.k.stride()[:3],
                *per_token(side.log_decay), *per_token(side.input_scale), *per_token(drow_sum),
                entering.states, entering.vectors, leaving.states, leaving.vectors,
                scan.cu_seqlens, scan.documents, scan.seqlen, scan.per_row(scan.chunk), scan.heads, scan.share,
                scan.d_state, scan.headdim, number,
                num_warps=scan.config.state_gradient_warps, num_stages=scan.config.stages,
                directions=len(sides), REVERSE=side.reverse, SHIFT=form.shift, GATED=da is not None,
                SCALED=dw is not None, ADD=add, NORMALIZE=drow_sum is not None, PACKED=scan.cu_seqlens is not None,
                CHUNK=scan.chunk, HEADS=heads, BLOCK_N=block_n, BLOCK_P=block_p, P_BLOCKS=p_blocks,
                PRECISION=scan.precision,
            )  # fmt: skip
            dq, dk, da, dw = into_q if add else dq, into_k if add else dk, into_a, into_w
        found.append((summed(dq, v.dtype), summed(dk, v.dtype), summed(da), summed(dw)))
    along = summed(along)
    return found, along + summed(along2) if halves and diagonal else along


def summed(parts: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """The sum of parts that several programs found, in a fixed order."""
    if parts is None:
        return None
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)
