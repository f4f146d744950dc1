"""Gradients through the states at a chunk's edges: of q, k, log-decays and input scales, both directions in one launch.

One program takes one tile, one direction, and some heads of a group, which q and k are summed over.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused.layout import (
    edge_sum,
    exponents,
    load_factor,
    load_rows,
    read_sums,
    shifted,
    state_dot,
    state_places,
    write_sums,
)
from matmix.kernels.slots import located


@triton.jit
def load_vector(vector, there, n0, D_STATE: tl.constexpr, BLOCK_N: tl.constexpr):
    """BLOCK_N elements of a state that holds sums over rows."""
    n = n0 + tl.arange(0, BLOCK_N)
    return tl.load(vector + n, mask=(n < D_STATE) & there, other=0.0)


@triton.jit
def passed_through(
    entering, entering_vector, leaving, leaving_vector, sums, before, behind, n0,
    REVERSE: tl.constexpr, NORMALIZE: tl.constexpr, CHUNK: tl.constexpr, D_STATE: tl.constexpr, HEADDIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What passes through a whole chunk: the product of the state that enters and the cotangent of the one that leaves,
    decayed over the chunk. All of the chunk's decays get it."""
    found = tl.zeros((BLOCK_N,), tl.float32)
    for p0 in tl.static_range(0, HEADDIM, BLOCK_P):
        at, inside = state_places(n0, p0, D_STATE, HEADDIM, BLOCK_N, BLOCK_P)
        h = tl.load(entering + at, mask=inside & before, other=0.0).to(tl.float32)
        g = tl.load(leaving + at, mask=inside & behind, other=0.0).to(tl.float32)
        found += tl.sum(h * g, 1)
    if NORMALIZE:
        h = load_vector(entering_vector, before, n0, D_STATE, BLOCK_N)
        found += h * load_vector(leaving_vector, behind, n0, D_STATE, BLOCK_N)
    high, low = edge_sum(sums, 0 if REVERSE else CHUNK - 1, CHUNK, EXACT)
    if EXACT:
        high += low
    return tl.sum(found, 0) * tl.exp2(high)


@triton.jit
def side_gradients(
    dq, dk, d_l, dq_pairs, dk_pairs, dq_cross, read, wrote, through, dy, dy_l, dy_h, v, v_l, v_h, q, q_l, k, k_l,
    u, u_l, u_h, sums, entering, entering_vectors, leaving, leaving_vectors, h0, r0, place, left, heads, before, behind,
    crossed, n0,
    directions: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    STORED: tl.constexpr, ADD: tl.constexpr, NORMALIZE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    FACTORS: tl.constexpr, HEADS: tl.constexpr, D_STATE: tl.constexpr, HEADDIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One direction; pointers stand at the tile's first token, the slot, and their first heads. `crossed`: whether the
    tile reads from the chunk's other one in this direction."""
    i = tl.arange(0, TILE)
    n = n0 + tl.arange(0, BLOCK_N)
    valid = i < left
    source, readable = shifted(i, place, left, REVERSE, SHIFT)
    dx = tl.zeros((TILE, BLOCK_N), tl.float32)
    dc = tl.zeros((TILE, BLOCK_N), tl.float32)
    elements: tl.constexpr = D_STATE * HEADDIM
    if STORED:
        for step in tl.range(HEADS, num_stages=1):
            head = (h0 + step).to(tl.int64)
            of_head = head * directions
            at_sums = sums + of_head * (FACTORS * CHUNK) if FACTORS else sums
            at_v = v + head * v_h
            at_y = dy + head * dy_h
            enters = entering + of_head * elements
            leaves = leaving + of_head * elements
            reading = tl.zeros((TILE, BLOCK_N), tl.float32)
            for p0 in tl.static_range(0, HEADDIM, BLOCK_P):
                at, inside = state_places(n0, p0, D_STATE, HEADDIM, BLOCK_N, BLOCK_P)
                h = tl.load(enters + at, mask=inside & before, other=0.0)
                grad = load_rows(at_y, dy_l, i, valid, p0, HEADDIM, BLOCK_P)
                reading = state_dot(grad, tl.trans(h), reading, PRECISION)
            if NORMALIZE:
                # The sum over a row is the product with one more channel of v that holds ones.
                h_sum = load_vector(entering_vectors + of_head * D_STATE, before, n0, D_STATE, BLOCK_N)
                reading += load_factor(u + head * u_h, u_l, i, valid)[:, None] * h_sum[None, :]
            if GATED:
                high, low = read_sums(at_sums + r0, i, r0, REVERSE, SHIFT, CHUNK, EXACT)
                reading *= tl.exp2(high + low if EXACT else high)[:, None]
                x = load_rows(q, q_l, source, readable, n0, D_STATE, BLOCK_N)
                tl.store(read + head + i * heads, tl.sum(reading * x.to(tl.float32), 1), mask=valid)
            dx += reading
            writing = tl.zeros((TILE, BLOCK_N), tl.float32)
            for p0 in tl.static_range(0, HEADDIM, BLOCK_P):
                at, inside = state_places(n0, p0, D_STATE, HEADDIM, BLOCK_N, BLOCK_P)
                g = tl.load(leaves + at, mask=inside & behind, other=0.0)
                value = load_rows(at_v, v_l, i, valid, p0, HEADDIM, BLOCK_P)
                writing = state_dot(value, tl.trans(g), writing, PRECISION)
            if NORMALIZE:
                g_sum = load_vector(leaving_vectors + of_head * D_STATE, behind, n0, D_STATE, BLOCK_N)
                writing += tl.where(valid[:, None], g_sum[None, :], 0.0)
            if GATED:
                edge_high, edge_low = edge_sum(at_sums, 0 if REVERSE else CHUNK - 1, CHUNK, EXACT)
                high, low = write_sums(at_sums + r0, i, CHUNK, EXACT)
                writing *= tl.exp2(exponents(edge_high, edge_low, high, low, EXACT))[:, None]
                if r0 == 0:
                    passed = passed_through(
                        enters, entering_vectors + of_head * D_STATE if NORMALIZE else entering_vectors,
                        leaves, leaving_vectors + of_head * D_STATE if NORMALIZE else leaving_vectors, at_sums, before,
                        behind, n0, REVERSE, NORMALIZE, CHUNK, D_STATE, HEADDIM, BLOCK_N, BLOCK_P, EXACT,
                    )  # fmt: skip
                    tl.store(through + head, passed)
            if GATED or SCALED:
                c = load_rows(k, k_l, i, valid, n0, D_STATE, BLOCK_N)
                tl.store(wrote + head + i * heads, tl.sum(writing * c.to(tl.float32), 1), mask=valid)
            if SCALED:
                writing *= tl.load(at_sums + ((2 if EXACT else 1) * CHUNK + r0) + i)[:, None]
            dc += writing

    inside = n[None, :] < D_STATE
    # A reader's gradient belongs to the token whose q it read with.
    target = ((source >= -place) & (source < left))[:, None] & inside
    at_x = source[:, None] * d_l + n[None, :]
    at_c = i[:, None] * d_l + n[None, :]
    if CHUNK > TILE:
        dx += tl.load(dq_cross + at_c, mask=valid[:, None] & inside & crossed, other=0.0)
    if ADD:
        dx += tl.load(dq_pairs + at_x, mask=target, other=0.0)
        dc += tl.load(dk_pairs + at_c, mask=valid[:, None] & inside, other=0.0)
    tl.store(dq + at_x, dx.to(dq.dtype.element_ty), mask=target)
    tl.store(dk + at_c, dc.to(dk.dtype.element_ty), mask=valid[:, None] & inside)


@triton.jit(do_not_specialize=["seqlen", "per_row", "f_s", "chunk_stride"])
def state_gradients(
    dq1, dk1, dq2, dk2, d_s, d_b, d_l, d_g, dq1_pairs, dk1_pairs, dq2_pairs, dk2_pairs, dq_cross,
    read1, wrote1, through1, read2, wrote2, through2, f_s, chunk_stride,
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
    to what `pair_gradients` found (with ADD, else dq and dk hold more parts). `read`, `wrote` and, for the chunk,
    `through` get a part for each such block. ENTERS, LEAVES: documents begin with states, or end with cotangents of
    states, that are not zero."""
    tiles: tl.constexpr = CHUNK // TILE
    directions: tl.constexpr = 2 if TWO else 1
    parts = heads // HEADS
    h0 = tl.program_id(0) % parts * HEADS
    unit = tl.program_id(0) // parts
    slot = unit // tiles
    r0 = unit % tiles * TILE
    n0 = tl.program_id(1) * BLOCK_N
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
    of_slot = slot.to(tl.int64) * heads * directions
    of_block = tl.program_id(1).to(tl.int64)
    at_h = of_block * f_s + (b * seqlen + t) * heads
    at_chunk = of_block * chunk_stride + slot.to(tl.int64) * heads
    elements: tl.constexpr = D_STATE * HEADDIM
    starts, ends = chunk > 0, (chunk + 1) * CHUNK < length
    at_v = v + b * v_b + t * v_l
    at_y = b * dy_b + t * dy_l
    at_u = u + b * u_b + t * u_l if NORMALIZE else u
    # The second tile reads from the first one in the direction that runs forward, and the other way round.
    forward = r0 > 0
    backward = (r0 == 0) & (left > TILE)
    if not TWO or tl.program_id(2) == 0:
        side_gradients(
            dq1 + at, dk1 + at, d_l, dq1_pairs + at_pairs if ADD else dq1_pairs,
            dk1_pairs + at_pairs if ADD else dk1_pairs, dq_cross + at if tiles > 1 else dq_cross,
            read1 + at_h if STORED and GATED1 else read1,
            wrote1 + at_h if STORED and (GATED1 or SCALED1) else wrote1,
            through1 + at_chunk if STORED and GATED1 else through1,
            dy1 + at_y, dy_l, dy_h, at_v, v_l, v_h, q1 + b * q1_b + t * q1_l + group * q1_g, q1_l,
            k1 + b * k1_b + t * k1_l + group * k1_g, k1_l, at_u, u_l, u_h,
            sums + of_slot * (FACTORS * CHUNK) if FACTORS else sums,
            entering + of_slot * elements if STORED else entering,
            entering_vectors + of_slot * D_STATE if STORED and NORMALIZE else entering_vectors,
            leaving + of_slot * elements if STORED else leaving,
            leaving_vectors + of_slot * D_STATE if STORED and NORMALIZE else leaving_vectors,
            h0, r0, place, left, heads, ENTERS | (ends if REVERSE else starts), LEAVES | (starts if REVERSE else ends),
            backward if REVERSE else forward, n0, directions, REVERSE, SHIFT, GATED1, SCALED1, STORED, ADD, NORMALIZE,
            CHUNK, TILE, FACTORS, HEADS, D_STATE, HEADDIM, BLOCK_N, BLOCK_P, PRECISION, EXACT,
        )  # fmt: skip
    else:
        of_slot += 1
        side_gradients(
            dq2 + at, dk2 + at, d_l, dq2_pairs + at_pairs if ADD else dq2_pairs,
            dk2_pairs + at_pairs if ADD else dk2_pairs, dq_cross + at if tiles > 1 else dq_cross,
            read2 + at_h if STORED and GATED2 else read2,
            wrote2 + at_h if STORED and (GATED2 or SCALED2) else wrote2,
            through2 + at_chunk if STORED and GATED2 else through2,
            dy2 + at_y, dy_l, dy_h, at_v, v_l, v_h, q2 + b * q2_b + t * q2_l + group * q2_g, q2_l,
            k2 + b * k2_b + t * k2_l + group * k2_g, k2_l, at_u, u_l, u_h,
            sums + of_slot * (FACTORS * CHUNK) if FACTORS else sums,
            entering + of_slot * elements if STORED else entering,
            entering_vectors + of_slot * D_STATE if STORED and NORMALIZE else entering_vectors,
            leaving + of_slot * elements if STORED else leaving,
            leaving_vectors + of_slot * D_STATE if STORED and NORMALIZE else leaving_vectors,
            h0, r0, place, left, heads, ENTERS | ends, LEAVES | starts,
            backward, n0, directions, True, SHIFT, GATED2, SCALED2, STORED, ADD, NORMALIZE, CHUNK, TILE, FACTORS, HEADS,
            D_STATE, HEADDIM, BLOCK_N, BLOCK_P, PRECISION, EXACT,
        )  # fmt: skip
