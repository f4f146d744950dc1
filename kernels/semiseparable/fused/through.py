"""Gradients through the states at a tile's edges: of q, k, log-decays and input scales, both directions in one launch.

One program takes one tile, one direction, and some heads of a group, which q and k are summed over. To the states of
the chunk's edges it adds the tiles between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused.layout import (
    add_tiles,
    chunk_decay,
    edge_sum,
    entering_edge,
    exponents,
    leaving_edge,
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
def state_at_tile(
    k, k_l, v, v_l, u, u_l, sums, state, vector, there, r0, place, left, n0, p0,
    REVERSE: tl.constexpr, COTANGENT: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    STORED: tl.constexpr, VECTOR: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, D_STATE: tl.constexpr,
    HEADDIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The state (BLOCK_N, BLOCK_P) that enters the tile, or with COTANGENT the cotangent of the one that leaves it, and
    the same for sums over rows: that of the chunk's edge (with STORED, where it is `there`), decayed, and what the
    chunk's tiles between add."""
    h = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    z = tl.zeros((BLOCK_N,), tl.float32)
    if STORED:
        at, inside = state_places(n0, p0, D_STATE, HEADDIM, BLOCK_N, BLOCK_P)
        h += tl.load(state + at, mask=inside & there, other=0.0).to(tl.float32)
        if VECTOR:
            n = n0 + tl.arange(0, BLOCK_N)
            z += tl.load(vector + n, mask=(n < D_STATE) & there, other=0.0)
        if GATED and CHUNK > TILE:
            if r0 + TILE < CHUNK if REVERSE != COTANGENT else r0 > 0:
                factor = chunk_decay(sums, r0, REVERSE, COTANGENT, CHUNK, TILE, EXACT)
                h *= factor
                z *= factor
    if CHUNK > TILE:
        h, z = add_tiles(
            h, z, k, k_l, v, v_l, u, u_l, sums, r0, place, left, n0, p0,
            REVERSE, COTANGENT, SHIFT, GATED, SCALED, VECTOR, CHUNK, TILE, D_STATE, HEADDIM, BLOCK_N, BLOCK_P,
            PRECISION, EXACT,
        )  # fmt: skip
    return h, z


@triton.jit
def side_gradients(
    dq, dk, d_l, dq_pairs, dk_pairs, read, wrote, through, dy, dy_l, dy_h, v, v_l, v_h, q, q_l, k, k_l, u, u_l, u_h,
    sums, entering, entering_vectors, leaving, leaving_vectors, h0, r0, place, left, heads, before, behind, n0,
    directions: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    STORED: tl.constexpr, ADD: tl.constexpr, NORMALIZE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    FACTORS: tl.constexpr, HEADS: tl.constexpr, D_STATE: tl.constexpr, HEADDIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One direction; pointers stand at the tile's first token, the slot, and their first heads."""
    i = tl.arange(0, TILE)
    n = n0 + tl.arange(0, BLOCK_N)
    valid = i < left
    source, readable = shifted(i, place, left, REVERSE, SHIFT)
    dx = tl.zeros((TILE, BLOCK_N), tl.float32)
    dc = tl.zeros((TILE, BLOCK_N), tl.float32)
    elements: tl.constexpr = D_STATE * HEADDIM
    for step in tl.range(HEADS, num_stages=1):
        head = (h0 + step).to(tl.int64)
        of_head = head * directions
        at_sums = sums + of_head * (FACTORS * CHUNK) if FACTORS else sums
        at_u = u + head * u_h if NORMALIZE else u
        at_v = v + head * v_h
        at_y = dy + head * dy_h
        reading = tl.zeros((TILE, BLOCK_N), tl.float32)
        writing = tl.zeros((TILE, BLOCK_N), tl.float32)
        passing = tl.zeros((BLOCK_N,), tl.float32)
        entry_high = 0.0
        entry_low = 0.0
        exit_high = 0.0
        exit_low = 0.0
        if GATED:
            entry_high, entry_low = edge_sum(at_sums, entering_edge(r0, REVERSE, TILE), CHUNK, EXACT)
            exit_high, exit_low = edge_sum(at_sums, leaving_edge(r0, REVERSE, TILE), CHUNK, EXACT)
        for p0 in tl.static_range(0, HEADDIM, BLOCK_P):
            h, h_sum = state_at_tile(
                k, k_l, at_v, v_l, at_u, u_l, at_sums, entering + of_head * elements if STORED else entering,
                entering_vectors + of_head * D_STATE if STORED and NORMALIZE else entering_vectors, before,
                r0, place, left, n0, p0, REVERSE, False, SHIFT, GATED, SCALED, STORED, NORMALIZE and p0 == 0,
                CHUNK, TILE, D_STATE, HEADDIM, BLOCK_N, BLOCK_P, PRECISION, EXACT,
            )  # fmt: skip
            grad = load_rows(at_y, dy_l, i, valid, p0, HEADDIM, BLOCK_P)
            reading = state_dot(grad, tl.trans(h), reading, PRECISION)
            if NORMALIZE and p0 == 0:
                # The sum over a row is the product with one more channel of v that holds ones.
                reading += load_factor(at_u, u_l, i, valid)[:, None] * h_sum[None, :]
            if p0 + BLOCK_P >= HEADDIM:
                # Here and not further down, so that not all tiles are in registers at the same time.
                factor = tl.where(valid, 1.0, 0.0)
                if GATED:
                    high, low = read_sums(at_sums + r0, i, r0, REVERSE, SHIFT, CHUNK, EXACT)
                    factor = tl.exp2(exponents(high, low, entry_high, entry_low, EXACT))
                    x = load_rows(q, q_l, source, readable, n0, D_STATE, BLOCK_N)
                    has_read = tl.sum(reading * x.to(tl.float32), 1) * factor
                    tl.store(read + head + i * heads, has_read, mask=valid)
                dx += reading * factor[:, None]
            g, g_sum = state_at_tile(
                q, q_l, at_y, dy_l, at_u, u_l, at_sums, leaving + of_head * elements if STORED else leaving,
                leaving_vectors + of_head * D_STATE if STORED and NORMALIZE else leaving_vectors, behind,
                r0, place, left, n0, p0, REVERSE, True, SHIFT, GATED, False, STORED, NORMALIZE and p0 == 0,
                CHUNK, TILE, D_STATE, HEADDIM, BLOCK_N, BLOCK_P, PRECISION, EXACT,
            )  # fmt: skip
            if GATED:
                passing += tl.sum(h * g, 1)
            value = load_rows(at_v, v_l, i, valid, p0, HEADDIM, BLOCK_P)
            writing = state_dot(value, tl.trans(g), writing, PRECISION)
            if NORMALIZE and p0 == 0:
                writing += tl.where(valid[:, None], g_sum[None, :], 0.0)
                passing += h_sum * g_sum
        if GATED:
            factor = tl.exp2(exponents(exit_high, exit_low, entry_high, entry_low, EXACT))
            tl.store(through + head, tl.sum(passing, 0) * factor)
        factor = tl.where(valid, 1.0, 0.0)
        if GATED:
            high, low = write_sums(at_sums + r0, i, CHUNK, EXACT)
            factor = tl.exp2(exponents(exit_high, exit_low, high, low, EXACT))
        if GATED or SCALED:
            c = load_rows(k, k_l, i, valid, n0, D_STATE, BLOCK_N)
            has_written = tl.sum(writing * c.to(tl.float32), 1) * factor
            tl.store(wrote + head + i * heads, has_written, mask=valid)
        if SCALED:
            factor *= tl.load(at_sums + ((2 if EXACT else 1) * CHUNK + r0) + i)
        dc += writing * factor[:, None]

    inside = n[None, :] < D_STATE
    # A reader's gradient belongs to the token whose q it read with.
    target = ((source >= -place) & (source < left))[:, None] & inside
    at_x = source[:, None] * d_l + n[None, :]
    at_c = i[:, None] * d_l + n[None, :]
    if ADD:
        dx += tl.load(dq_pairs + at_x, mask=target, other=0.0)
        dc += tl.load(dk_pairs + at_c, mask=valid[:, None] & inside, other=0.0)
    tl.store(dq + at_x, dx.to(dq.dtype.element_ty), mask=target)
    tl.store(dk + at_c, dc.to(dk.dtype.element_ty), mask=valid[:, None] & inside)


@triton.jit(do_not_specialize=["seqlen", "per_row", "f_s", "tile_stride"])
def state_gradients(
    dq1, dk1, dq2, dk2, d_s, d_b, d_l, d_g, dq1_pairs, dk1_pairs, dq2_pairs, dk2_pairs,
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
    """What goes through the states at a tile's edges, for BLOCK_N elements of q and k, added to what `pair_gradients`
    found (with ADD, else dq and dk hold more parts). `read`, `wrote` and `through` get a part for each such block.
    ENTERS, LEAVES: documents begin with states, or end with cotangents of states, that are not zero."""
    tiles: tl.constexpr = CHUNK // TILE
    directions: tl.constexpr = 2 if TWO else 1
    parts = heads // HEADS
    h0 = tl.program_id(0) % parts * HEADS
    unit = tl.program_id(0) // parts
    slot = unit // tiles
    r0 = unit % tiles * TILE
    n0 = tl.program_id(1) * BLOCK_N
    group = (h0 // share).to(tl.int64)
    part = h0 % share // HEADS
    chunk, batch_row, begin, length = located(slot, table, seqlen, per_row, PACKED)
    place = chunk * CHUNK + r0
    left = length - place
    if left <= 0:
        return
    b = batch_row.to(tl.int64)
    t = (begin + place).to(tl.int64)
    at_pairs = b * d_b + t * d_l + group * d_g
    at = part.to(tl.int64) * d_s + at_pairs
    of_slot = slot.to(tl.int64) * heads * directions
    of_block = tl.program_id(1).to(tl.int64)
    at_h = of_block * f_s + (b * seqlen + t) * heads
    at_tile = of_block * tile_stride + unit.to(tl.int64) * heads
    elements: tl.constexpr = D_STATE * HEADDIM
    starts, ends = chunk > 0, (chunk + 1) * CHUNK < length
    at_v = v + b * v_b + t * v_l
    at_y = b * dy_b + t * dy_l
    at_u = u + b * u_b + t * u_l if NORMALIZE else u
    if not TWO or tl.program_id(2) == 0:
        side_gradients(
            dq1 + at, dk1 + at, d_l, dq1_pairs + at_pairs if ADD else dq1_pairs,
            dk1_pairs + at_pairs if ADD else dk1_pairs, read1 + at_h if GATED1 else read1,
            wrote1 + at_h if GATED1 or SCALED1 else wrote1, through1 + at_tile if GATED1 else through1,
            dy1 + at_y, dy_l, dy_h, at_v, v_l, v_h, q1 + b * q1_b + t * q1_l + group * q1_g, q1_l,
            k1 + b * k1_b + t * k1_l + group * k1_g, k1_l, at_u, u_l, u_h,
            sums + of_slot * (FACTORS * CHUNK) if FACTORS else sums,
            entering + of_slot * elements if STORED else entering,
            entering_vectors + of_slot * D_STATE if STORED and NORMALIZE else entering_vectors,
            leaving + of_slot * elements if STORED else leaving,
            leaving_vectors + of_slot * D_STATE if STORED and NORMALIZE else leaving_vectors,
            h0, r0, place, left, heads, ENTERS | (ends if REVERSE else starts), LEAVES | (starts if REVERSE else ends),
            n0, directions, REVERSE, SHIFT, GATED1, SCALED1, STORED, ADD, NORMALIZE, CHUNK, TILE, FACTORS, HEADS,
            D_STATE, HEADDIM, BLOCK_N, BLOCK_P, PRECISION, EXACT,
        )  # fmt: skip
    else:
        of_slot += 1
        side_gradients(
            dq2 + at, dk2 + at, d_l, dq2_pairs + at_pairs if ADD else dq2_pairs,
            dk2_pairs + at_pairs if ADD else dk2_pairs, read2 + at_h if GATED2 else read2,
            wrote2 + at_h if GATED2 or SCALED2 else wrote2, through2 + at_tile if GATED2 else through2,
            dy2 + at_y, dy_l, dy_h, at_v, v_l, v_h, q2 + b * q2_b + t * q2_l + group * q2_g, q2_l,
            k2 + b * k2_b + t * k2_l + group * k2_g, k2_l, at_u, u_l, u_h,
            sums + of_slot * (FACTORS * CHUNK) if FACTORS else sums,
            entering + of_slot * elements if STORED else entering,
            entering_vectors + of_slot * D_STATE if STORED and NORMALIZE else entering_vectors,
            leaving + of_slot * elements if STORED else leaving,
            leaving_vectors + of_slot * D_STATE if STORED and NORMALIZE else leaving_vectors,
            h0, r0, place, left, heads, ENTERS | ends, LEAVES | starts,
            n0, directions, True, SHIFT, GATED2, SCALED2, STORED, ADD, NORMALIZE, CHUNK, TILE, FACTORS, HEADS,
            D_STATE, HEADDIM, BLOCK_N, BLOCK_P, PRECISION, EXACT,
        )  # fmt: skip
