"""States between chunks: one pass over each document, from either end, in parallel over heads and directions.

The same kernel computes the states that enter each chunk and, in the backward pass, the cotangents of the states
that leave it: both are h <- exp(sum of decays) h + sum over the chunk's tokens of weight_t key_t value_t^T, only
the order of chunks, the keys (k or shifted q), the values (v or dy) and the weights differ.

Few long documents would leave most of a GPU idle. They are cut into spans: a first launch runs every span from
zero, `combine_spans` passes the results along the spans, and a second launch runs each span from its true start.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.launching import launch
from matmix.kernels.semiseparable.form import ScanCall
from matmix.kernels.semiseparable.fused.layout import (
    add_tile,
    state_places,
    tile_edges,
)
from matmix.kernels.semiseparable.fused.scan import Scan, one_or_two, per_token, rows
from matmix.kernels.slots import bounds, first_slot, located


@triton.jit
def pass_side(
    k, k_b, k_l, k_g, v, v_l, u, u_l, w, w_b, w_l, w_h, sums, states, vectors, entry, entry_vectors, ends, end_vectors,
    end_decays, row, begin, length, first, last, head, heads, share, of_unit, of_slot, of_sums, n0, p0,
    REVERSE: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Run a tile (BLOCK_N, BLOCK_P) of one direction's state through chunks first .. last - 1 of a document. v and u
    stand at the document's first token and the program's head; of_unit, of_slot and of_sums are numbers of states and
    of sums that come before the direction's first one."""
    elements = C.D_STATE * C.HEADDIM
    step_of_states = heads * (2 if C.TWO else 1)
    sums_step = heads * (C.SIDES * C.FACTORS * C.CHUNK)
    k += row * k_b + begin * k_l + head // share * k_g
    if SCALED:
        w += row * w_b + begin * w_l + head * w_h
    if C.FACTORS:
        sums += of_sums
    if C.STORE:
        states += of_slot * elements
        vectors = vectors + of_slot * C.D_STATE if C.NORMALIZE else vectors
    if C.ENTRY:
        entry += of_unit * elements
        entry_vectors = entry_vectors + of_unit * C.D_STATE if C.NORMALIZE else entry_vectors
    if C.END:
        ends += of_unit * elements
        end_vectors = end_vectors + of_unit * C.D_STATE if C.NORMALIZE else end_vectors
    n = n0 + tl.arange(0, C.BLOCK_N)
    at_state, in_state = state_places(n0, p0, C.BLOCK_N, C)
    h = tl.zeros((C.BLOCK_N, C.BLOCK_P), tl.float32)
    z = tl.zeros((C.BLOCK_N,), tl.float32)
    if C.ENTRY:
        h += tl.load(entry + at_state, mask=in_state, other=0.0).to(tl.float32)
        if C.NORMALIZE:
            z += tl.load(entry_vectors + n, mask=n < C.D_STATE, other=0.0)
    # The cotangent of a direction's states runs the other way.
    backward: tl.constexpr = REVERSE != C.COTANGENT
    tiles: tl.constexpr = C.CHUNK // C.TILE
    passed = tl.sum(z * 0.0, 0)
    steps = (last - first) * tiles
    for step in range(steps):
        # (Added to a tensor because the interpreter counts in Python's integers.)
        number = first * tiles + (steps - 1 - step if backward else first * 0 + step)
        chunk = number // tiles
        tile = number % tiles
        r0 = tile * C.TILE
        place = number * C.TILE
        left = length - place
        if C.WHOLE:
            tl.assume(left >= C.TILE)
        if C.STORE:
            # What enters a document is not stored where it is nothing.
            inner_chunk = (chunk + 1) * C.CHUNK < length if backward else chunk > 0
            if (tile == (tiles - 1 if backward else 0)) & (C.INITIAL | inner_chunk):
                target = states + chunk.to(tl.int64) * (step_of_states * elements) + at_state
                tl.store(target, h.to(states.dtype.element_ty), mask=in_state)
                if C.NORMALIZE:
                    tl.store(vectors + chunk.to(tl.int64) * (step_of_states * C.D_STATE) + n, z, mask=n < C.D_STATE)
        # The state goes from one edge of the tile to the other; its cotangent from the last token to before the first.
        of_chunk = sums
        edge_high = 0.0
        edge_low = 0.0
        if GATED:
            of_chunk = sums + chunk.to(tl.int64) * sums_step
            inner_high, inner_low, outer_high, outer_low, through = tile_edges(of_chunk, r0, REVERSE, C)
            h *= tl.exp2(through)
            if C.NORMALIZE:
                z *= tl.exp2(through)
            if C.DECAYS:
                passed += through
            edge_high = outer_high if C.COTANGENT else inner_high
            edge_low = outer_low if C.COTANGENT else inner_low
        at = place.to(tl.int64)
        h, z = add_tile(
            h, z, k + at * k_l, k_l, v + at * v_l, v_l, u + at * u_l if (C.NORMALIZE and C.COTANGENT) else u, u_l,
            w + at * w_l if SCALED else w, w_l, of_chunk, edge_high, edge_low, r0, place, left, n0, p0, REVERSE,
            C.COTANGENT, GATED, SCALED, C,
        )  # fmt: skip
    if C.END:
        tl.store(ends + at_state, h, mask=in_state)
        if C.NORMALIZE:
            tl.store(end_vectors + n, z, mask=n < C.D_STATE)
    if C.DECAYS:
        tl.store(end_decays + of_unit, tl.exp2(passed))


@triton.jit(do_not_specialize=["seqlen", "per_row", "spans_per_row", "span_chunks"])
def state_pass(
    k1, k1_b, k1_l: tl.constexpr, k1_g, k2, k2_b, k2_l: tl.constexpr, k2_g, v1, v2, v_b, v_l: tl.constexpr, v_h, u, u_b,
    u_l: tl.constexpr, u_h, w1, w1_b, w1_l: tl.constexpr, w1_h, w2, w2_b, w2_l: tl.constexpr, w2_h, sums, states,
    vectors, entry, entry_vectors, ends, end_vectors, end_decays, table, seqlen, per_row, spans_per_row, span_chunks,
    heads, share, C: tl.constexpr,
):  # fmt: skip
    """One span of one document, one head, one tile of the state, one direction. The first direction runs backward if
    REVERSE; a second one always does. `sums` are SIDES directions', from the first of these on."""
    unit = tl.program_id(0) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    tiles: tl.constexpr = (C.HEADDIM + C.BLOCK_P - 1) // C.BLOCK_P
    n0 = tl.program_id(1) // tiles * C.BLOCK_N
    p0 = tl.program_id(1) % tiles * C.BLOCK_P
    directions: tl.constexpr = 2 if C.TWO else 1
    piece, row, begin, length = located(unit, table, seqlen, spans_per_row, C.PACKED)
    first = piece * span_chunks
    last = tl.minimum(first + span_chunks, tl.cdiv(length, C.CHUNK))
    if C.PACKED:
        document = tl.load(table + unit * 4)
    else:
        document = row
    slot = first_slot(document, begin, per_row, C.CHUNK, C.PACKED).to(tl.int64)
    unit = unit.to(tl.int64)
    row = row.to(tl.int64)
    begin = begin.to(tl.int64)
    side: tl.constexpr = C.FACTORS * C.CHUNK
    of_unit = (unit * heads + head) * directions
    of_slot = (slot * heads + head) * directions
    of_sums = (slot * heads + head) * (C.SIDES * side)
    at_v = row * v_b + begin * v_l + head * v_h
    of_u = u + row * u_b + begin * u_l + head * u_h if (C.NORMALIZE and C.COTANGENT) else u
    if not C.TWO or tl.program_id(2) == 0:
        pass_side(
            k1, k1_b, k1_l, k1_g, v1 + at_v, v_l, of_u, u_l, w1, w1_b, w1_l, w1_h, sums, states, vectors, entry,
            entry_vectors, ends, end_vectors, end_decays, row, begin, length, first, last, head, heads, share, of_unit,
            of_slot, of_sums, n0, p0, C.REVERSE, C.GATED1, C.SCALED1, C,
        )  # fmt: skip
    else:
        pass_side(
            k2, k2_b, k2_l, k2_g, v2 + at_v, v_l, of_u, u_l, w2, w2_b, w2_l, w2_h, sums, states, vectors, entry,
            entry_vectors, ends, end_vectors, end_decays, row, begin, length, first, last, head, heads, share,
            of_unit + 1, of_slot + 1, of_sums + side, n0, p0, True, C.GATED2, C.SCALED2, C,
        )  # fmt: skip


@triton.jit(do_not_specialize=["per_row", "span", "seqlen", "elements"])
def combine_spans(
    ends, end_decays, initial, final, cu_seqlens, seqlen, per_row, span, heads, elements, C: tl.constexpr
):
    """Replace what each span of a document adds to the state, in `ends`, by the state that enters the span."""
    document = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    directions: tl.constexpr = 2 if C.TWO else 1
    direction = tl.program_id(2) % directions
    e = tl.program_id(2) // directions * C.BLOCK + tl.arange(0, C.BLOCK)
    inside = e < elements
    backward = (direction == 1) | C.REVERSE
    if C.COTANGENT:
        backward = backward == False  # noqa: E712 (a tensor)
    begin, length = bounds(document, cu_seqlens, seqlen, C.PACKED)
    first = first_slot(document, begin, per_row, span, C.PACKED)
    spans = tl.cdiv(length, span)
    of_document = ((document.to(tl.int64) * heads + head) * directions + direction) * elements + e
    h = tl.zeros((C.BLOCK,), tl.float32)
    if C.INITIAL:
        h += tl.load(initial + of_document, mask=inside, other=0.0).to(tl.float32)
    for step in range(spans):
        unit = (first + tl.where(backward, spans - 1 - step, step)).to(tl.int64)
        which = (unit * heads + head) * directions + direction
        added = tl.load(ends + which * elements + e, mask=inside, other=0.0)
        tl.store(ends + which * elements + e, h, mask=inside)
        h = h * tl.load(end_decays + which) + added
    if C.FINAL:
        tl.store(final + of_document, h, mask=inside)


class States(NamedTuple):
    """States of all directions at chunk edges."""

    states: Tensor | None
    """(slots, nheads, directions, d_state, headdim)."""
    vectors: Tensor | None
    """(slots, nheads, directions, d_state) float32: the same for the sums over rows."""
    ends: Tensor | None
    """(documents, nheads, directions, d_state, headdim) float32: behind the last chunk, where asked for."""
    end_vectors: Tensor | None
    """(documents, nheads, directions, d_state) float32."""
    given: bool
    """True if documents begin with states that are not zero, or of a part may."""

    @property
    def finals(self) -> Tensor:
        """Both ends, (documents, nheads, directions, d_state, headdim), with a column more for sums over rows."""
        if self.end_vectors is None:
            return self.ends
        return torch.cat([self.ends, self.end_vectors.unsqueeze(-1)], -1)


def pass_states(
    scan: Scan, call: ScanCall, values: list[Tensor], initial: list[Tensor | None], sums: Tensor | None, *,
    cotangent: bool = False, sum_factor: Tensor | None = None, want_ends: bool = False, store: bool = True,
    before: int = 0, send: Callable[[Tensor, Tensor | None], None] | None = None,
) -> States:  # fmt: skip
    """States that enter the chunks; with `cotangent`, the cotangents of the states that leave them. What enters a
    document is left out (unwritten) where all documents begin, or end, with nothing.

    values, initial: v or those of dy, and the states at the start, by direction, with a column more where the form is
    normalised. sums: those of as many directions more
    as come `before` the call's. send: of a part of rows; it is given the ends, also those of the vectors (documents,
    nheads, directions, d_state), as soon as they are under way, and what enters documents is written.
    """
    sides, form = call.sides, call.form
    keys = [side.q if cotangent else side.k for side in sides]
    count, like, vector = len(sides), values[0], form.normalize
    documents, heads, n, p = scan.documents, scan.heads, scan.d_state, scan.headdim

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=like.device)

    slots = scan.slots(scan.chunk)
    # float16 could not hold what long documents add up to.
    held = torch.bfloat16 if like.dtype == torch.bfloat16 else torch.float32
    states = empty(slots, heads, count, n, p, dtype=held) if store else None
    vectors = empty(slots, heads, count, n) if store and vector else None
    entry = entry_vectors = None
    if any(state is not None for state in initial):
        zero = torch.zeros(documents, heads, n, p + vector, device=like.device) if None in initial else None
        entry = torch.stack([(zero if state is None else state).float() for state in initial], 2)
        if vector:
            entry, entry_vectors = entry[..., :p].contiguous(), entry[..., p].contiguous()
    given, want_ends = entry is not None or send is not None, want_ends or send is not None
    ends = empty(documents, heads, count, n, p) if want_ends else None
    end_vectors = empty(documents, heads, count, n) if want_ends and vector else None

    _, n_blocks, _, p_blocks = scan.blocks("block")
    tiles = n_blocks * p_blocks
    programs = documents * heads * tiles
    chunks = scan.per_row(scan.chunk)
    span = max(8, -(-scan.rows * chunks * heads * tiles // scan.programs))
    split = programs < scan.programs // 2 and chunks >= 4 * span
    if not split:
        # Longer than the row: every document is one unit, numbered like the documents.
        span = scan.seqlen // scan.chunk + 1
    units = scan.slots(span * scan.chunk) if split else documents
    per_row = scan.per_row(span * scan.chunk) if split else 1
    span_ends = empty(units, heads, count, n, p) if split else None
    span_vectors = empty(units, heads, count, n) if split and vector else None
    span_decays = empty(units, heads, count) if split else None
    first, second, _ = one_or_two(sides, form)
    weights = [per_token(None if cotangent else side.input_scale) for side in (first, second)]
    scaled = [weight[0] is not None for weight in weights]
    factors = scan.factors(sides)
    if factors:
        table = sums[: slots * heads * (before + count) * factors * scan.chunk]
        sums = table.view(slots, heads, before + count, -1)[:, :, before:]
    # Tiles are longer than the others', as this kernel makes no pairs of tokens.
    common = scan.constants(sides, form, "block") | {
        "COTANGENT": cotangent, "SCALED1": scaled[0], "SCALED2": scaled[1], "NORMALIZE": vector,
        "TILE": min(scan.chunk, scan.config.state_tile),
    }  # fmt: skip

    def run(
        entries: Tensor | None, entry_vectors: Tensor | None, out: Tensor | None, out_vectors: Tensor | None,
        summing: bool,
    ) -> None:  # fmt: skip
        launch(
            state_pass, (units * heads, tiles, count),
            *rows(keys[0]), *rows(keys[-1]), values[0], *rows(values[-1]), *per_token(sum_factor), *weights[0],
            *weights[1], sums, None if summing else states, None if summing else vectors, entries, entry_vectors, out,
            out_vectors, span_decays if summing else None, scan.table(span * scan.chunk),
            scan.seqlen, scan.per_row(scan.chunk), per_row, span, heads, scan.share,
            **common, num_warps=scan.config.state_warps, num_stages=scan.config.stages, STORE=store and not summing,
            ENTRY=entries is not None, INITIAL=given, END=out is not None, DECAYS=summing,
            SIDES=before + count,
        )  # fmt: skip

    if not split:
        run(entry, entry_vectors, ends, end_vectors, False)
        if send is not None:
            send(ends, end_vectors)
        return States(states, vectors, ends, end_vectors, given)
    run(None, None, span_ends, span_vectors, True)
    for of_span, start, end in ((span_ends, entry, ends), (span_vectors, entry_vectors, end_vectors)):
        if of_span is not None:
            elements = of_span[0, 0, 0].numel()
            block = min(1024, triton.next_power_of_2(elements))
            launch(
                combine_spans, (documents, heads, -(-elements // block) * count),
                of_span, span_decays, start, end, scan.cu_seqlens, scan.seqlen, per_row, span * scan.chunk,
                heads, elements, num_warps=4, TWO=count == 2, REVERSE=first.reverse, COTANGENT=cotangent,
                PACKED=scan.cu_seqlens is not None, INITIAL=start is not None, FINAL=end is not None, BLOCK=block,
            )  # fmt: skip
    if send is not None:
        send(ends, end_vectors)
    if store:
        run(span_ends, span_vectors, None, None, False)
    return States(states, vectors, ends, end_vectors, given)
