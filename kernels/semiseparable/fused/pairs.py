"""Gradients inside tiles, for all directions at once: of v (whole), of the diagonal, and what pairs of tokens of one
tile give to those of q, k, log-decays and input scales.

One program takes one tile and some heads of a group: q and k get the sum over those heads, so that the gradient of
the scores is added up first and multiplied with q and k once. What goes through states to other tiles is added in
through.py; for v it is added here, where the gradient is at hand.

Matrices have writers in their rows and readers in their columns, so that the product with dy needs no transposition.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused.layout import (
    chunk_decay,
    edge_sum,
    exponents,
    leaving_edge,
    load_factor,
    load_rows,
    read_sums,
    shifted,
    side_exponents,
    side_scores,
    state_dot,
    state_places,
    write_sums,
)
from matmix.kernels.slots import located


@triton.jit
def triangle_decays(
    sums, i, r0, inside,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The decay of each pair of a writer (row) and a reader of one direction; 0 where they do not meet in it."""
    if GATED:
        exponent = side_exponents(sums, i, r0, REVERSE, SHIFT, GATED, True, CHUNK, EXACT)
        found = tl.exp2(tl.where(inside, exponent, float("-inf")))
    else:
        found = tl.where(inside, 1.0, 0.0)
    return found


@triton.jit
def side_pairs(
    scores, pairs, dscores, along, own, sums, readers, writers, scales, inside, neighbours, r0, valid, heads,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One direction of one head: stores what readers, writers and input scales get, and returns the direction's part of
    the matrix without the diagonal, the sum `dscores` with its part, and its input scales.

    `along` and `own` are the diagonals of `pairs` and of the scores (times their weight), which count without shift.
    """
    i = tl.arange(0, TILE)
    decays = triangle_decays(sums, i, r0, inside, REVERSE, SHIFT, GATED, CHUNK, EXACT)
    scale = tl.where(valid, 1.0, 0.0)
    if SCALED:
        scale = tl.load(sums + ((2 if EXACT else 1) * CHUNK + r0) + i)
    matrix = scores * decays
    if SCALED:
        dscores += pairs * (decays * scale[:, None])
    else:
        dscores += pairs * decays
    changes = pairs * matrix
    if SCALED:
        dscale = tl.sum(changes, 1)
        if not SHIFT:
            dscale += along * own
        tl.store(scales + i * heads, dscale, mask=valid)
        matrix *= scale[:, None]
    if GATED:
        # With shift there is no decay between neighbours: what such pairs add to readers and take from writers would
        # cancel to rounding only, far too much where the other decays are strong.
        if SHIFT:
            changes = tl.where(neighbours, 0.0, changes)
        tl.store(writers + i * heads, tl.sum(changes, 1) * scale, mask=valid)
        if SCALED:
            changes *= scale[:, None]
        tl.store(readers + i * heads, tl.sum(changes, 0), mask=valid)
    return matrix, dscores, scale


@triton.jit
def write_state(
    out, whole, q, q_l, k, k_l, dy, dy_l, sums, leaving, there, r0, place, left, p0,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, STORED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, D_STATE: tl.constexpr, HEADDIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`out` (TILE, BLOCK_P) and what a tile's values get through its leaving edge: through the state at the chunk's
    edge and from the chunk's tiles between."""
    i = tl.arange(0, TILE)
    valid = i < left
    wrote = tl.zeros((TILE, BLOCK_P), tl.float32)
    if GATED:
        edge_high, edge_low = edge_sum(sums, leaving_edge(r0, REVERSE, TILE), CHUNK, EXACT)
    if STORED:
        for n0 in tl.static_range(0, D_STATE, BLOCK_N):
            c = whole if D_STATE <= BLOCK_N else load_rows(k, k_l, i, valid, n0, D_STATE, BLOCK_N)
            at, inside = state_places(n0, p0, D_STATE, HEADDIM, BLOCK_N, BLOCK_P)
            wrote = state_dot(c, tl.load(leaving + at, mask=inside & there, other=0.0), wrote, PRECISION)
        if GATED and CHUNK > TILE:
            wrote *= chunk_decay(sums, r0, REVERSE, True, CHUNK, TILE, EXACT)
    if CHUNK > TILE:
        here = r0 // TILE
        last = tl.minimum(here + tl.cdiv(left, TILE), CHUNK // TILE)
        for tile in tl.range(here * 0 if REVERSE else here + 1, here if REVERSE else last, num_stages=1):
            ahead = tile * TILE - r0
            source, readable = shifted(i, place + ahead, left - ahead, REVERSE, SHIFT)
            scores = side_scores(
                whole, k, k_l, q + ahead * q_l, q_l, i, valid, source, readable, D_STATE, TILE, BLOCK_N, PRECISION
            )
            if GATED:
                high, low = read_sums(sums + (r0 + ahead), i, r0 + ahead, REVERSE, SHIFT, CHUNK, EXACT)
                scores *= tl.exp2(exponents(high, low, edge_high, edge_low, EXACT))[None, :]
            grad = load_rows(dy + ahead * dy_l, dy_l, i, i < left - ahead, p0, HEADDIM, BLOCK_P)
            wrote = tl.dot(scores.to(grad.dtype), grad, acc=wrote, input_precision=PRECISION)
    factor = tl.where(valid, 1.0, 0.0)
    if SCALED:
        factor = tl.load(sums + ((2 if EXACT else 1) * CHUNK + r0) + i)
    if GATED:
        high, low = write_sums(sums + r0, i, CHUNK, EXACT)
        factor *= tl.exp2(exponents(edge_high, edge_low, high, low, EXACT))
    return out + wrote * factor[:, None]


@triton.jit
def store_vector_gradients(
    dscores, met, dq, dk, d_l, q, q_l, k, k_l, place, left,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr, D_STATE: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk of one direction from the gradient of its scores; `met`: of tokens' scores with themselves."""
    i = tl.arange(0, TILE)
    valid = i < left
    source, readable = shifted(i, place, left, REVERSE, SHIFT)
    # A reader's gradient belongs to the token whose q it read with.
    target = (source >= -place) & (source < left)
    for n0 in tl.range(0, D_STATE, BLOCK_N, num_stages=1):
        n = n0 + tl.arange(0, BLOCK_N)
        inside = n < D_STATE
        x = load_rows(q, q_l, source, readable, n0, D_STATE, BLOCK_N)
        c = load_rows(k, k_l, i, valid, n0, D_STATE, BLOCK_N)
        dc = tl.dot(dscores.to(x.dtype), x, input_precision=PRECISION)
        # Transposed like the scores, which as a first factor would have to be turned round in registers.
        dx = tl.dot(tl.trans(c), dscores.to(c.dtype), input_precision=PRECISION)
        if not SHIFT:
            dc += met[:, None] * x.to(tl.float32)
            dx += met[None, :] * tl.trans(c).to(tl.float32)
        at_x = dq + source[None, :] * d_l + n[:, None]
        tl.store(at_x, dx.to(dq.dtype.element_ty), mask=target[None, :] & inside[:, None])
        at_c = dk + i[:, None] * d_l + n[None, :]
        tl.store(at_c, dc.to(dk.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["seqlen", "per_row", "self_weight"])
def pair_gradients(
    dv, dv_b, dv_l, dv_h, dq1, dk1, dq2, dk2, d_s, d_b, d_l, d_g,
    readers1, writers1, scales1, readers2, writers2, scales2, dd1, dd2,
    dy1, dy2, dy_b, dy_l, dy_h, v, v_b, v_l, v_h,
    q1, q1_b, q1_l, q1_g, k1, k1_b, k1_l, k1_g, q2, q2_b, q2_l, q2_g, k2, k2_b, k2_l, k2_g,
    given, given_b, given_l, given_h, u, u_b, u_l, u_h,
    sums, leaving, table, seqlen, per_row, heads, share, self_weight,
    TWO: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED1: tl.constexpr, GATED2: tl.constexpr,
    SCALED1: tl.constexpr, SCALED2: tl.constexpr, DIAGONAL: tl.constexpr, HALVES: tl.constexpr,
    NORMALIZE: tl.constexpr, STORED: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, FACTORS: tl.constexpr, HEADS: tl.constexpr, D_STATE: tl.constexpr, HEADDIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What happens inside a tile. HALVES: each direction has a cotangent of its own.

    `readers` and `writers` get, for each token, the sum of the gradients of the exponents of all pairs in which it
    reads or writes; `scales` what its input scale gets.
    """
    tiles: tl.constexpr = CHUNK // TILE
    directions: tl.constexpr = 2 if TWO else 1
    parts = heads // HEADS
    h0 = tl.program_id(0) % parts * HEADS
    unit = tl.program_id(0) // parts
    slot = unit // tiles
    r0 = unit % tiles * TILE
    group = (h0 // share).to(tl.int64)
    part = h0 % share // HEADS
    chunk, batch_row, begin, length = located(slot, table, seqlen, per_row, PACKED)
    place = chunk * CHUNK + r0
    left = length - place
    if left <= 0:
        return
    b = batch_row.to(tl.int64)
    t = (begin + place).to(tl.int64)
    i = tl.arange(0, TILE)
    valid = i < left
    on = i[:, None] == i[None, :]
    # Which of the strict triangles belongs to the first direction; writers are rows.
    first = i[:, None] > i[None, :] if REVERSE else i[:, None] < i[None, :]
    second = i[:, None] > i[None, :]
    neighbours = (i[:, None] == i[None, :] + 1) | (i[:, None] + 1 == i[None, :])
    elements: tl.constexpr = D_STATE * HEADDIM
    starts, ends = chunk > 0, (chunk + 1) * CHUNK < length

    at_q1 = q1 + b * q1_b + t * q1_l + group * q1_g
    at_k1 = k1 + b * k1_b + t * k1_l + group * k1_g
    source, readable = shifted(i, place, left, REVERSE, SHIFT)
    whole1 = load_rows(at_k1, k1_l, i, valid, 0, D_STATE, BLOCK_N)
    whole2 = whole1
    scores = side_scores(
        whole1, at_k1, k1_l, at_q1, q1_l, i, valid, source, readable, D_STATE, TILE, BLOCK_N, PRECISION
    )
    met1 = tl.zeros((TILE,), tl.float32)
    met2 = tl.zeros((TILE,), tl.float32)
    own1 = tl.zeros((TILE,), tl.float32)
    own2 = tl.zeros((TILE,), tl.float32)
    if not SHIFT:
        own1 += tl.sum(tl.where(on, scores, 0.0), 1)
    if TWO:
        at_q2 = q2 + b * q2_b + t * q2_l + group * q2_g
        at_k2 = k2 + b * k2_b + t * k2_l + group * k2_g
        source, readable = shifted(i, place, left, True, SHIFT)
        whole2 = load_rows(at_k2, k2_l, i, valid, 0, D_STATE, BLOCK_N)
        scores2 = side_scores(
            whole2, at_k2, k2_l, at_q2, q2_l, i, valid, source, readable, D_STATE, TILE, BLOCK_N, PRECISION
        )
        if not SHIFT:
            own2 += tl.sum(tl.where(on, scores2, 0.0), 1)
        scores = tl.where(on, 0.0, tl.where(first, scores, scores2))
    else:
        scores = tl.where(first, scores, 0.0)
    dscores = tl.zeros((TILE, TILE), tl.float32)

    for step in tl.range(HEADS, num_stages=1):
        head = (h0 + step).to(tl.int64)
        at_h = (b * seqlen + t) * heads + head
        of_token = i * heads
        at_y = b * dy_b + t * dy_l + head * dy_h
        at_v = v + b * v_b + t * v_l + head * v_h
        of_slot = (slot.to(tl.int64) * heads + head) * directions
        sums1 = sums + of_slot * (FACTORS * CHUNK) if FACTORS else sums
        sums2 = sums + (of_slot + 1) * (FACTORS * CHUNK) if FACTORS else sums

        pairs = tl.zeros((TILE, TILE), tl.float32)
        if HALVES:
            pairs2 = tl.zeros((TILE, TILE), tl.float32)
        for p0 in tl.static_range(0, HEADDIM, BLOCK_P):
            value = load_rows(at_v, v_l, i, valid, p0, HEADDIM, BLOCK_P)
            grad = load_rows(dy1 + at_y, dy_l, i, valid, p0, HEADDIM, BLOCK_P)
            pairs = tl.dot(value, tl.trans(grad), acc=pairs, input_precision=PRECISION)
            if HALVES:
                grad = load_rows(dy2 + at_y, dy_l, i, valid, p0, HEADDIM, BLOCK_P)
                pairs2 = tl.dot(value, tl.trans(grad), acc=pairs2, input_precision=PRECISION)
        if NORMALIZE:
            # The sum over a row is the product with one more channel of v that holds ones.
            factor = load_factor(u + b * u_b + t * u_l + head * u_h, u_l, i, valid)
            pairs += tl.where(valid[:, None], factor[None, :], 0.0)
        along1 = tl.zeros((TILE,), tl.float32)
        along2 = along1
        if DIAGONAL or not SHIFT:
            along1 += tl.sum(tl.where(on, pairs, 0.0), 1)
            along2 = along1
            if HALVES:
                along2 = tl.sum(tl.where(on, pairs2, 0.0), 1)
        if DIAGONAL:
            tl.store(dd1 + at_h + of_token, along1, mask=valid)
            if HALVES:
                tl.store(dd2 + at_h + of_token, along2, mask=valid)
        # Each direction's own terms (without shift) lie on the diagonal, and have no decay.
        own = own1 * self_weight
        also = own2 * self_weight
        matrix, dscores, scale = side_pairs(
            scores, pairs, dscores, along1, own, sums1, readers1 + at_h if GATED1 else readers1,
            writers1 + at_h if GATED1 else writers1, scales1 + at_h if SCALED1 else scales1, first, neighbours, r0,
            valid, heads, REVERSE, SHIFT, GATED1, SCALED1, CHUNK, TILE, EXACT,
        )  # fmt: skip
        own *= scale
        met1 += along1 * scale * self_weight
        if TWO:
            half, dscores, scale = side_pairs(
                scores, pairs2 if HALVES else pairs, dscores, along2, also, sums2,
                readers2 + at_h if GATED2 else readers2, writers2 + at_h if GATED2 else writers2,
                scales2 + at_h if SCALED2 else scales2, second, neighbours, r0, valid, heads,
                True, SHIFT, GATED2, SCALED2, CHUNK, TILE, EXACT,
            )  # fmt: skip
            also *= scale
            met2 += along2 * scale * self_weight
            if not HALVES:
                matrix += half

        diagonal = tl.zeros((TILE,), tl.float32)
        if DIAGONAL:
            diagonal += load_factor(given + b * given_b + t * given_l + head * given_h, given_l, i, valid)
        if HALVES:
            half = tl.where(on, (also + diagonal)[:, None], half)
            matrix = tl.where(on, (own + diagonal)[:, None], matrix)
        else:
            matrix = tl.where(on, (own + also + diagonal)[:, None], matrix)
        for p0 in tl.static_range(0, HEADDIM, BLOCK_P):
            grad = load_rows(dy1 + at_y, dy_l, i, valid, p0, HEADDIM, BLOCK_P)
            out = tl.dot(matrix.to(grad.dtype), grad, input_precision=PRECISION)
            if HALVES:
                grad = load_rows(dy2 + at_y, dy_l, i, valid, p0, HEADDIM, BLOCK_P)
                out = tl.dot(half.to(grad.dtype), grad, acc=out, input_precision=PRECISION)
            if STORED or tiles > 1:
                out = write_state(
                    out, whole1, at_q1, q1_l, at_k1, k1_l, dy1 + at_y, dy_l, sums1,
                    leaving + of_slot * elements if STORED else leaving, INITIAL | (starts if REVERSE else ends), r0,
                    place, left, p0, REVERSE, SHIFT, GATED1, SCALED1, STORED, CHUNK, TILE, D_STATE, HEADDIM, BLOCK_N,
                    BLOCK_P, PRECISION, EXACT,
                )  # fmt: skip
                if TWO:
                    out = write_state(
                        out, whole2, at_q2, q2_l, at_k2, k2_l, dy2 + at_y, dy_l, sums2,
                        leaving + (of_slot + 1) * elements if STORED else leaving, INITIAL | starts, r0,
                        place, left, p0, True, SHIFT, GATED2, SCALED2, STORED, CHUNK, TILE, D_STATE, HEADDIM, BLOCK_N,
                        BLOCK_P, PRECISION, EXACT,
                    )  # fmt: skip
            p = p0 + tl.arange(0, BLOCK_P)
            target = dv + b * dv_b + t * dv_l + head * dv_h + i[:, None] * dv_l + p[None, :]
            inside = valid[:, None]
            if HEADDIM % BLOCK_P != 0:
                inside = inside & (p[None, :] < HEADDIM)
            tl.store(target, out.to(dv.dtype.element_ty), mask=inside)

    at = part.to(tl.int64) * d_s + b * d_b + t * d_l + group * d_g
    store_vector_gradients(
        tl.where(first, dscores, 0.0), met1, dq1 + at, dk1 + at, d_l, at_q1, q1_l, at_k1, k1_l, place, left,
        REVERSE, SHIFT, TILE, D_STATE, BLOCK_N, PRECISION,
    )  # fmt: skip
    if TWO:
        store_vector_gradients(
            tl.where(second, dscores, 0.0), met2, dq2 + at, dk2 + at, d_l, at_q2, q2_l, at_k2, k2_l, place, left,
            True, SHIFT, TILE, D_STATE, BLOCK_N, PRECISION,
        )  # fmt: skip
