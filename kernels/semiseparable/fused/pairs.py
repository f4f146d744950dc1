"""Gradients inside chunks: of q, k, log-decays, input scales and the diagonal, for all directions at once.

One program takes one chunk and some heads of a group: q and k get the sum over those heads, so that the gradient of
the scores is added up first and multiplied with q and k once. What goes through the states between chunks is added
in through.py.

The gradient of a token's log-decay is the sum over everything whose decay it takes part in; here, over the pairs of a
reader and a writer on either side of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused.layout import (
    decay_matrix,
    load_factor,
    load_rows,
    log_decays,
    shifted,
    side_scores,
    two_floats,
)
from matmix.kernels.slots import locate


@triton.jit
def pair_decays(
    a, a_l, start, length,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Decay from every writer (column) to every reader (row) of one direction."""
    i = tl.arange(0, CHUNK)
    decay = log_decays(a, a_l, i, start + i < length, GATED)
    write = tl.cumsum(decay, 0, reverse=REVERSE)
    read = write - decay if SHIFT else write
    read_high, read_low = two_floats(read)
    write_high, write_low = two_floats(-write)
    return decay_matrix(read_high, read_low, write_high, write_low, EXACT)


@triton.jit
def store_decay_gradient(pairs, da, valid, REVERSE: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr):
    """Sums gradients of the exponents of all pairs over those pairs that a token's decay lies between."""
    i = tl.arange(0, CHUNK)
    # With shift there is no decay next to the diagonal: what such pairs add to readers and take from writers would
    # cancel to rounding only, far too much where the other decays are strong.
    if REVERSE:
        pairs = tl.where(i[:, None] < i[None, :] - (1 if SHIFT else 0), pairs, 0.0)
    else:
        pairs = tl.where(i[:, None] > i[None, :] + (1 if SHIFT else 0), pairs, 0.0)
    readers = tl.sum(pairs, 1).to(tl.float64)
    writers = tl.sum(pairs, 0).to(tl.float64)
    between = tl.cumsum(readers, 0, reverse=not REVERSE) - tl.cumsum(writers, 0, reverse=not REVERSE)
    if SHIFT:
        between -= readers
    tl.store(da, between.to(tl.float32), mask=valid)


@triton.jit
def store_vector_gradients(
    dscores, met, dq, dk, d_l, q, q_l, k, k_l, start, length, d_state,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, N_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk of one direction from the gradient of its scores; `met`: of tokens' scores with themselves."""
    i = tl.arange(0, CHUNK)
    valid = start + i < length
    source, readable = shifted(i, start, length, REVERSE, SHIFT)
    # A reader's gradient belongs to the token whose q it read with.
    target = (start + source >= 0) & (start + source < length)
    for block in range(N_BLOCKS):
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = n[None, :] < d_state
        x = load_rows(q, q_l, source, readable, block * BLOCK_N, d_state, BLOCK_N)
        c = load_rows(k, k_l, i, valid, block * BLOCK_N, d_state, BLOCK_N)
        dx = tl.dot(dscores.to(c.dtype), c, input_precision=PRECISION)
        dc = tl.dot(tl.trans(dscores).to(x.dtype), x, input_precision=PRECISION)
        if not SHIFT:
            dx += met[:, None] * c.to(tl.float32)
            dc += met[:, None] * x.to(tl.float32)
        tl.store(dq + source[:, None] * d_l + n[None, :], dx.to(dq.dtype.element_ty), mask=target[:, None] & inside)
        tl.store(dk + i[:, None] * d_l + n[None, :], dc.to(dk.dtype.element_ty), mask=valid[:, None] & inside)


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row", "self_weight"])
def pair_gradients(
    dq1, dk1, dq2, dk2, d_s, d_b, d_l, d_g, da1, dw1, da2, dw2, dd1, dd2,
    dy1, dy2, dy_b, dy_l, dy_h, v, v_b, v_l, v_h,
    q1, q1_b, q1_l, q1_g, k1, k1_b, k1_l, k1_g, q2, q2_b, q2_l, q2_g, k2, k2_b, k2_l, k2_g,
    a1, a1_b, a1_l, a1_h, a2, a2_b, a2_l, a2_h, w1, w1_b, w1_l, w1_h, w2, w2_b, w2_l, w2_h, u, u_b, u_l, u_h,
    cu_seqlens, documents, seqlen, per_row, heads, share, d_state, headdim, self_weight,
    TWO: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED1: tl.constexpr, GATED2: tl.constexpr,
    SCALED1: tl.constexpr, SCALED2: tl.constexpr, DIAGONAL: tl.constexpr, HALVES: tl.constexpr,
    NORMALIZE: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    N_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, P_BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """What happens inside a chunk. HALVES: each direction has a cotangent of its own."""
    slot = tl.program_id(0)
    h0 = tl.program_id(1) * HEADS
    group = h0 // share
    part = h0 % share // HEADS
    _document, chunk, batch_row, begin, length = locate(slot, cu_seqlens, documents, seqlen, per_row, CHUNK, PACKED)
    start = chunk * CHUNK
    if start >= length:
        return
    b = batch_row.to(tl.int64)
    t = (begin + start).to(tl.int64)
    i = tl.arange(0, CHUNK)
    valid = start + i < length
    diagonal = i[:, None] == i[None, :]
    # Which of the strict triangles belongs to the first direction.
    first = i[:, None] < i[None, :] if REVERSE else i[:, None] > i[None, :]

    at_q1 = q1 + b * q1_b + t * q1_l + group * q1_g
    at_k1 = k1 + b * k1_b + t * k1_l + group * k1_g
    source, readable = shifted(i, start, length, REVERSE, SHIFT)
    scores = side_scores(
        at_q1, q1_l, at_k1, k1_l, source, readable, i, valid, d_state, CHUNK, CHUNK, BLOCK_N, N_BLOCKS, PRECISION
    )
    met1 = tl.zeros((CHUNK,), tl.float32)
    met2 = tl.zeros((CHUNK,), tl.float32)
    if not SHIFT:
        own1 = tl.sum(tl.where(diagonal, scores, 0.0), 1)
    if TWO:
        at_q2 = q2 + b * q2_b + t * q2_l + group * q2_g
        at_k2 = k2 + b * k2_b + t * k2_l + group * k2_g
        source, readable = shifted(i, start, length, True, SHIFT)
        scores2 = side_scores(
            at_q2, q2_l, at_k2, k2_l, source, readable, i, valid, d_state, CHUNK, CHUNK, BLOCK_N, N_BLOCKS, PRECISION
        )
        if not SHIFT:
            own2 = tl.sum(tl.where(diagonal, scores2, 0.0), 1)
        scores = tl.where(diagonal, 0.0, tl.where(first, scores, scores2))
    else:
        scores = tl.where(first, scores, 0.0)
    dscores = tl.zeros((CHUNK, CHUNK), tl.float32)

    for step in range(HEADS):
        head = h0 + step
        at_h = (b * seqlen + t + i) * heads + head
        at_y = b * dy_b + t * dy_l + head * dy_h
        at_v = v + b * v_b + t * v_l + head * v_h
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        if HALVES:
            pairs2 = tl.zeros((CHUNK, CHUNK), tl.float32)
        for block in range(P_BLOCKS):
            grad = load_rows(dy1 + at_y, dy_l, i, valid, block * BLOCK_P, headdim, BLOCK_P)
            value = load_rows(at_v, v_l, i, valid, block * BLOCK_P, headdim, BLOCK_P)
            pairs = tl.dot(grad, tl.trans(value), acc=pairs, input_precision=PRECISION)
            if HALVES:
                grad = load_rows(dy2 + at_y, dy_l, i, valid, block * BLOCK_P, headdim, BLOCK_P)
                pairs2 = tl.dot(grad, tl.trans(value), acc=pairs2, input_precision=PRECISION)
        if NORMALIZE:
            # The sum over a row is the product with one more channel of v that holds ones.
            pairs += tl.where(valid[None, :], load_factor(u + b * u_b + head * u_h, u_l, t + i, valid)[:, None], 0.0)
        if DIAGONAL or not SHIFT:
            along1 = tl.sum(tl.where(diagonal, pairs, 0.0), 1)
            along2 = along1
            if HALVES:
                along2 = tl.sum(tl.where(diagonal, pairs2, 0.0), 1)
        if DIAGONAL:
            tl.store(dd1 + at_h, along1, mask=valid)
            if HALVES:
                tl.store(dd2 + at_h, along2, mask=valid)
        if HALVES:
            pairs = tl.where(first, pairs, pairs2)

        if GATED1 or GATED2:
            at_a = a1 + b * a1_b + t * a1_l + head * a1_h if GATED1 else a1
            decays = pair_decays(at_a, a1_l, start, length, REVERSE, SHIFT, GATED1, EXACT, CHUNK)
            if TWO:
                at_a = a2 + b * a2_b + t * a2_l + head * a2_h if GATED2 else a2
                decays = tl.where(
                    first, decays, pair_decays(at_a, a2_l, start, length, True, SHIFT, GATED2, EXACT, CHUNK)
                )
            pairs *= decays
        pairs = tl.where(diagonal, 0.0, pairs) if TWO else tl.where(first, pairs, 0.0)
        own_part1 = self_weight * along1 if not SHIFT else met1
        if SCALED1:
            scale1 = load_factor(w1 + b * w1_b + head * w1_h, w1_l, t + i, valid)
            dscale = tl.sum(tl.where(first, pairs * scores, 0.0), 0)
            if not SHIFT:
                dscale += own_part1 * own1
                own_part1 *= scale1
            tl.store(dw1 + at_h, dscale, mask=valid)
        if SCALED2:
            scale2 = load_factor(w2 + b * w2_b + head * w2_h, w2_l, t + i, valid)
            dscale = tl.sum(tl.where(first, 0.0, pairs * scores), 0)
            if not SHIFT:
                dscale += self_weight * along2 * own2
            tl.store(dw2 + at_h, dscale, mask=valid)
        if SCALED1:
            pairs *= tl.where(first, scale1[None, :], 1.0) if TWO else scale1[None, :]
        if SCALED2:
            pairs *= tl.where(first, 1.0, scale2[None, :])
        dscores += pairs
        if not SHIFT:
            met1 += own_part1
            if TWO:
                met2 += self_weight * along2 * scale2 if SCALED2 else self_weight * along2
        if GATED1:
            store_decay_gradient(pairs * scores, da1 + at_h, valid, REVERSE, SHIFT, CHUNK)
        if GATED2:
            store_decay_gradient(pairs * scores, da2 + at_h, valid, True, SHIFT, CHUNK)

    at = part.to(tl.int64) * d_s + b * d_b + t * d_l + group * d_g
    if TWO:
        store_vector_gradients(
            tl.where(first, dscores, 0.0), met1, dq1 + at, dk1 + at, d_l, at_q1, q1_l, at_k1, k1_l,
            start, length, d_state, REVERSE, SHIFT, CHUNK, BLOCK_N, N_BLOCKS, PRECISION,
        )  # fmt: skip
        store_vector_gradients(
            tl.where(first, 0.0, dscores), met2, dq2 + at, dk2 + at, d_l, at_q2, q2_l, at_k2, k2_l,
            start, length, d_state, True, SHIFT, CHUNK, BLOCK_N, N_BLOCKS, PRECISION,
        )  # fmt: skip
    else:
        store_vector_gradients(
            dscores, met1, dq1 + at, dk1 + at, d_l, at_q1, q1_l, at_k1, k1_l,
            start, length, d_state, REVERSE, SHIFT, CHUNK, BLOCK_N, N_BLOCKS, PRECISION,
        )  # fmt: skip
