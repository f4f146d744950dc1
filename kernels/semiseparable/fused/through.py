"""Gradients through the states at a chunk's edges: of q, k, log-decays and input scales, both directions in one launch.

One program takes one tile, one direction, either its readers or its writers, and some heads of a group, which q and k
are summed over. Readers meet the state that enters the chunk, writers the cotangent of the one that leaves it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused.layout import (
    edge_sum,
    exponents,
    load_factor,
    load_rows,
    state_dot,
    state_places,
)
from matmix.kernels.slots import located


@triton.jit
def load_vector(vector, there, n0, D_STATE: tl.constexpr, BLOCK_N: tl.constexpr):
    """BLOCK_N elements of a state that holds sums over rows."""
    n = n0 + tl.arange(0, BLOCK_N)
    return tl.load(vector + n, mask=(n < D_STATE) & there, other=0.0)


@triton.jit
def passed_through(
    entering, leaving, there, first, ROWS: tl.constexpr, D_STATE: tl.constexpr, HEADDIM: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """What passes through a whole chunk, before its decay: the product of the state that enters and the cotangent of
    the one that leaves; of ROWS of their rows."""
    found = 0.0
    for p0 in tl.static_range(0, HEADDIM, BLOCK_P):
        at, inside = state_places(first, p0, D_STATE, HEADDIM, ROWS, BLOCK_P)
        h = tl.load(entering + at, mask=inside & there, other=0.0).to(tl.float32)
        found += tl.sum(h * tl.load(leaving + at, mask=inside & there, other=0.0).to(tl.float32))
    return found


@triton.jit
def one_side(x1, x2, second, TWO: tl.constexpr):
    """The pointer, stride or flag of the second direction, or that of the first one."""
    return tl.where(second, x2, x1) if TWO else x1


@triton.jit(do_not_specialize=["seqlen", "per_row", "f_s", "tile_stride"])
def state_gradients(
    dq1, dk1, dq2, dk2, d_s, d_b, d_l, d_g, dq1_pairs, dk1_pairs, dq2_pairs, dk2_pairs, dq_cross,
    read1, wrote1, through1, read2, wrote2, through2, f_s, tile_stride,
    dy1, dy2, dy_b, dy_l, dy_h, v, v_b, v_l, v_h,
    q1, q1_b, q1_l, q1_g, k1, k1_b, k1_l, k1_g, q2, q2_b, q2_l, q2_g, k2, k2_b, k2_l, k2_g, u, u_b, u_l, u_h,
    sums, entering, entering_vectors, leaving, leaving_vectors, table, seqlen, per_row, heads, share,
    TWO: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED1: tl.constexpr, GATED2: tl.constexpr,
    SCALED1: tl.constexpr, SCALED2: tl.constexpr, STORED: tl.constexpr, ENTERS: tl.constexpr, LEAVES: tl.constexpr,
    ADD: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    FACTORS: tl.constexpr, HEADS: tl.constexpr, D_STATE: tl.constexpr, HEADDIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What goes through the states at a chunk's edges (where states are STORED), for BLOCK_N elements of q and k, added
    to what `pair_gradients` found (with ADD, else dq and dk hold more parts). `read`, `wrote` and, for each tile of a
    chunk, `through` get a part for each such block. ENTERS, LEAVES: documents begin with states, or end with cotangents
    of states, that are not zero."""
    tiles: tl.constexpr = CHUNK // TILE
    directions: tl.constexpr = 2 if TWO else 1
    parts = heads // HEADS
    h0 = tl.program_id(0) % parts * HEADS
    unit = tl.program_id(0) // parts
    slot = unit // tiles
    r0 = unit % tiles * TILE
    n0 = tl.program_id(1) * BLOCK_N
    writes = tl.program_id(2) % 2 == 1
    second = tl.program_id(2) >= 2
    group = (h0 // share).to(tl.int64)
    part = (h0 % share // HEADS).to(tl.int64)
    chunk, batch_row, begin, length = located(slot, table, seqlen, per_row, PACKED)
    place = chunk * CHUNK + r0
    left = length - place
    if left <= 0:
        return
    b = batch_row.to(tl.int64)
    t = (begin + place).to(tl.int64)
    at_pairs = b * d_b + t * d_l + group * d_g
    at = part * d_s + at_pairs
    of_slot = slot.to(tl.int64) * heads * directions + tl.where(second, 1, 0)
    of_block = tl.program_id(1).to(tl.int64)
    at_h = of_block * f_s + (b * seqlen + t) * heads
    at_tile = of_block * tile_stride + unit.to(tl.int64) * heads
    elements: tl.constexpr = D_STATE * HEADDIM
    GATED: tl.constexpr = GATED1 or GATED2
    SCALED: tl.constexpr = SCALED1 or SCALED2
    reverse = second | REVERSE
    starts, ends = chunk > 0, (chunk + 1) * CHUNK < length
    enters = ENTERS | tl.where(reverse, ends, starts)
    leaves = LEAVES | tl.where(reverse, starts, ends)
    # The second tile reads from the first one in the direction that runs forward, and the other way round.
    crossed = tl.where(reverse, (r0 == 0) & (left > TILE), r0 > 0) & (writes == 0)
    gated = one_side(GATED1, GATED2, second, TWO)
    scaled = one_side(SCALED1, SCALED2, second, TWO)
    at_u = u + b * u_b + t * u_l if NORMALIZE else u
    of_sums = sums + of_slot * (FACTORS * CHUNK) if FACTORS else sums
    # Readers have dy, q and the state that enters; writers v, k and the cotangent of the one that leaves.
    rows = tl.where(writes, v + b * v_b + t * v_l, one_side(dy1, dy2, second, TWO) + b * dy_b + t * dy_l)
    rows_l, rows_h = tl.where(writes, v_l, dy_l), tl.where(writes, v_h, dy_h)
    x_b = tl.where(writes, one_side(k1_b, k2_b, second, TWO), one_side(q1_b, q2_b, second, TWO))
    x_l = tl.where(writes, one_side(k1_l, k2_l, second, TWO), one_side(q1_l, q2_l, second, TWO))
    x_g = tl.where(writes, one_side(k1_g, k2_g, second, TWO), one_side(q1_g, q2_g, second, TWO))
    x = tl.where(writes, one_side(k1, k2, second, TWO), one_side(q1, q2, second, TWO))
    x += b * x_b + t * x_l + group * x_g
    out = tl.where(writes, one_side(dk1, dk2, second, TWO), one_side(dq1, dq2, second, TWO)) + at

    i = tl.arange(0, TILE)
    n = n0 + tl.arange(0, BLOCK_N)
    valid = i < left
    source = i
    if SHIFT:
        source += tl.where(writes, 0, tl.where(reverse, 1, -1))
    # A reader's gradient belongs to the token whose q it read with.
    there = (source >= -place) & (source < left)
    grad = tl.zeros((TILE, BLOCK_N), tl.float32)
    if STORED:
        shared: tl.constexpr = BLOCK_N * TILE // CHUNK
        if GATED or SCALED:
            found = tl.where(writes, one_side(wrote1, wrote2, second, TWO), one_side(read1, read2, second, TWO)) + at_h
        if GATED:
            of_through = one_side(through1, through2, second, TWO) + at_tile
        states = tl.where(writes, leaving, entering) + of_slot * elements
        has_state = tl.where(writes, leaves, enters)
        first_share = r0 // TILE
        # What passes through the chunk is found by its readers; those of the last tile that has tokens take the shares
        # of the tiles behind it.
        last_share = tl.where(writes, first_share, tl.where(left > TILE, first_share + 1, tiles))
        end = tl.where(reverse, 0, CHUNK - 1)
        vector = load_rows(x, x_l, source, there & valid, n0, D_STATE, BLOCK_N).to(tl.float32)
        for step in tl.range(HEADS, num_stages=1):
            head = (h0 + step).to(tl.int64)
            of_head = head * directions
            at_sums = of_sums + of_head * (FACTORS * CHUNK) if FACTORS else of_sums
            of_state = states + of_head * elements
            met = tl.zeros((TILE, BLOCK_N), tl.float32)
            for p0 in tl.static_range(0, HEADDIM, BLOCK_P):
                at_state, inside = state_places(n0, p0, D_STATE, HEADDIM, BLOCK_N, BLOCK_P)
                h = tl.load(of_state + at_state, mask=inside & has_state, other=0.0)
                row = load_rows(rows + head * rows_h, rows_l, i, valid, p0, HEADDIM, BLOCK_P)
                met = state_dot(row, tl.trans(h), met, PRECISION)
            if NORMALIZE:
                # The sum over a row is the product with one more channel of v that holds ones.
                of_vector = (of_slot + of_head) * D_STATE
                h_sum = load_vector(entering_vectors + of_vector, enters, n0, D_STATE, BLOCK_N)
                g_sum = load_vector(leaving_vectors + of_vector, leaves, n0, D_STATE, BLOCK_N)
                ones = tl.where(writes, tl.where(valid, 1.0, 0.0), load_factor(at_u + head * u_h, u_l, i, valid))
                met += ones[:, None] * tl.where(writes, g_sum, h_sum)[None, :]
            factor = tl.where(valid, 1.0, 0.0)
            if GATED:
                end_high, end_low = edge_sum(at_sums, end, CHUNK, EXACT)
                high, low = edge_sum(at_sums, source + r0, CHUNK, EXACT)
                behind = exponents(end_high, end_low, high, low, EXACT)
                before = high + low if EXACT else high
                factor = tl.where(gated, tl.exp2(tl.where(writes, behind, before)), factor)
                passed = 0.0
                for share in tl.range(first_share, last_share, num_stages=1):
                    passed += passed_through(
                        of_state, leaving + (of_slot + of_head) * elements, enters & leaves, n0 + share * shared, shared,
                        D_STATE, HEADDIM, BLOCK_P,
                    )  # fmt: skip
                if NORMALIZE:
                    passed += tl.where(r0 == 0, tl.sum(h_sum * g_sum, 0), 0.0)
                passed *= tl.exp2(end_high + end_low if EXACT else end_high)
                tl.store(of_through + head, passed, mask=writes == 0)
            if GATED or SCALED:
                tl.store(found + head + i * heads, tl.sum(met * vector, 1) * factor, mask=valid)
            if SCALED:
                scale = tl.load(at_sums + ((2 if EXACT else 1) * CHUNK + r0) + i)
                factor *= tl.where(scaled & writes, scale, 1.0)
            grad += met * factor[:, None]

    inside = n[None, :] < D_STATE
    if tiles > 1:
        at_cross = dq_cross + at + i[:, None] * d_l + n[None, :]
        grad += tl.load(at_cross, mask=valid[:, None] & inside & crossed, other=0.0)
    place_x = source[:, None] * d_l + n[None, :]
    inside = there[:, None] & inside
    if ADD:
        q_pairs, k_pairs = one_side(dq1_pairs, dq2_pairs, second, TWO), one_side(dk1_pairs, dk2_pairs, second, TWO)
        grad += tl.load(tl.where(writes, k_pairs, q_pairs) + at_pairs + place_x, mask=inside, other=0.0)
    tl.store(out + place_x, grad.to(out.dtype.element_ty), mask=inside)
