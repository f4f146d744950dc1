"""Gradients of q, k, the log-decays, the input scales and the diagonal, one direction at a time.

One program takes one chunk and some heads of a group: q and k get the sum over heads, so the gradient of the
scores is added up over heads first and multiplied with q and k once.

The gradient of a token's log-decay is the sum over everything whose decay it takes part in: pairs (reader,
writer) on both sides of it, the entering state for those who read after it, the leaving state for those who
wrote before it, and the state that passes the whole chunk. Summed like that nothing has to cancel, where
differences of cumulative sums would lose small gradients of strong decays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused.layout import (
    BEYOND,
    first_slot,
    load_rows,
    locate,
    log_decays,
    two_floats,
)


@triton.jit
def read_write_exponents(
    a, a_l, start, length, REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, CHUNK: tl.constexpr
):
    """Log2 decays: from the entry to what a token reads and has written (two floats each); as factors: from the
    entry to a token's reading, from its writing to the exit, and over the whole chunk."""
    i = tl.arange(0, CHUNK)
    decay = log_decays(a, a_l, i, start + i < length, GATED)
    write = tl.cumsum(decay, 0, reverse=REVERSE)
    read = write - decay if SHIFT else write
    total = tl.sum(decay, 0)
    read_high, read_low = two_floats(read)
    write_high, write_low = two_floats(write)
    enter = tl.exp2(read.to(tl.float32))
    leave = tl.exp2((total - write).to(tl.float32))
    return read_high, read_low, write_high, write_low, enter, leave, tl.exp2(total.to(tl.float32))


@triton.jit
def load_state(at, offset, d_state, headdim, p0, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    n = tl.arange(0, BLOCK_N)
    p = p0 + tl.arange(0, BLOCK_P)
    inside = (n[:, None] < d_state) & (p[None, :] < headdim)
    return tl.load(at + offset + n[:, None] * headdim + p[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row", "self_weight", "direction"])
def side_gradients(
    dq, dk, d_s, d_b, d_l, d_g, da, dw, dd,
    dy, dy_b, dy_l, dy_h, v, v_b, v_l, v_h, q, q_b, q_l, q_g, k, k_b, k_l, k_g,
    a, a_b, a_l, a_h, w, w_b, w_l, w_h, u, u_b, u_l, u_h,
    states, vectors, leaving, leaving_vectors,
    cu_seqlens, documents, seqlen, per_row, heads, share, d_state, headdim, self_weight, direction,
    directions: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    DIAGONAL: tl.constexpr, CARRIED: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, P_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes dq and dk (one part per block of HEADS heads of the group), da, dw and dd (batch, seqlen, nheads)."""
    slot = tl.program_id(0)
    h0 = tl.program_id(1) * HEADS
    group = h0 // share
    part = h0 % share // HEADS
    document, chunk, batch_row, begin, length = locate(slot, cu_seqlens, documents, seqlen, per_row, CHUNK, PACKED)
    start = chunk * CHUNK
    if start >= length:
        return
    b = batch_row.to(tl.int64)
    t = (begin + start).to(tl.int64)
    i = tl.arange(0, CHUNK)
    valid = start + i < length
    moved = (1 if REVERSE else -1) if SHIFT else 0
    source = i + moved
    readable = valid & (start + source >= 0) & (start + source < length)
    diagonal = i[:, None] == i[None, :]
    if REVERSE:
        strict = i[:, None] < i[None, :]
        # Which readers (rows) a token's decay (columns) stands before, and which writers it stands after.
        reads_past = i[:, None] <= i[None, :] - (1 if SHIFT else 0)
        written_before = i[:, None] > i[None, :]
    else:
        strict = i[:, None] > i[None, :]
        reads_past = i[:, None] >= i[None, :] + (1 if SHIFT else 0)
        written_before = i[:, None] < i[None, :]

    x = load_rows(q + b * q_b + t * q_l + group * q_g, q_l, source, readable, d_state, BLOCK_N)
    c = load_rows(k + b * k_b + t * k_l + group * k_g, k_l, i, valid, d_state, BLOCK_N)
    scores = tl.dot(x, tl.trans(c), input_precision=PRECISION)
    if not SHIFT:
        own = tl.sum(tl.where(diagonal, scores, 0.0), 1)
        met = tl.zeros((CHUNK,), tl.float32)
    scores = tl.where(strict, scores, 0.0)
    dscores = tl.zeros((CHUNK, CHUNK), tl.float32)
    dx = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    dc = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    place = first_slot(document, begin, per_row, CHUNK, PACKED) + chunk

    for step in range(HEADS):
        head = h0 + step
        at_y = dy + b * dy_b + t * dy_l + head * dy_h
        at_v = v + b * v_b + t * v_l + head * v_h
        which = (place.to(tl.int64) * heads + head) * directions + direction
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        if CARRIED:
            reading = tl.zeros((CHUNK, BLOCK_N), tl.float32)
            writing = tl.zeros((CHUNK, BLOCK_N), tl.float32)
            through = tl.zeros((BLOCK_N,), tl.float32)
        for block in range(P_BLOCKS):
            p0 = block * BLOCK_P
            grad = load_rows(at_y + p0, dy_l, i, valid, headdim - p0, BLOCK_P)
            value = load_rows(at_v + p0, v_l, i, valid, headdim - p0, BLOCK_P)
            pairs = tl.dot(grad, tl.trans(value), acc=pairs, input_precision=PRECISION)
            if CARRIED:
                enters = load_state(states, which * d_state * headdim, d_state, headdim, p0, BLOCK_N, BLOCK_P)
                leaves = load_state(leaving, which * d_state * headdim, d_state, headdim, p0, BLOCK_N, BLOCK_P)
                if GATED:
                    through += tl.sum(enters.to(tl.float32) * leaves.to(tl.float32), 1)
                reading = tl.dot(grad, tl.trans(enters.to(x.dtype)), acc=reading, input_precision=PRECISION)
                writing = tl.dot(value, tl.trans(leaves.to(x.dtype)), acc=writing, input_precision=PRECISION)
        at_h = (b * seqlen + t + i) * heads + head
        if NORMALIZE:
            # The sum over a row is the product with one more channel of v that holds ones.
            of_sum = tl.load(u + b * u_b + (t + i) * u_l + head * u_h, mask=valid, other=0.0).to(tl.float32)
            pairs += tl.where(valid[None, :], of_sum[:, None], 0.0)
            if CARRIED:
                n = tl.arange(0, BLOCK_N)
                enters_vector = tl.load(vectors + which * d_state + n, mask=n < d_state, other=0.0)
                leaves_vector = tl.load(leaving_vectors + which * d_state + n, mask=n < d_state, other=0.0)
                reading += of_sum[:, None] * enters_vector[None, :]
                writing += tl.where(valid[:, None], leaves_vector[None, :], 0.0)
                if GATED:
                    through += enters_vector * leaves_vector
        if DIAGONAL or not SHIFT:
            along = tl.sum(tl.where(diagonal, pairs, 0.0), 1)
        if DIAGONAL:
            tl.store(dd + at_h, along, mask=valid)

        if GATED:
            read_high, read_low, write_high, write_low, enter, leave, total = read_write_exponents(
                a + b * a_b + t * a_l + head * a_h, a_l, start, length, REVERSE, SHIFT, GATED, CHUNK
            )
            exponents = (read_high[:, None] - write_high[None, :]) + (read_low[:, None] - write_low[None, :])
            pairs *= tl.exp2(tl.where(exponents > BEYOND, 0.0, exponents))
        pairs = tl.where(strict, pairs, 0.0)
        if SCALED:
            at_w = w + b * w_b + t * w_l + head * w_h
            scale = tl.load(at_w + i * w_l, mask=valid, other=0.0).to(tl.float32)
            dscale = tl.sum(pairs * scores, 0)
            pairs *= scale[None, :]
        dscores += pairs
        if not SHIFT:
            share_of_own = self_weight * along
            if SCALED:
                dscale_own = share_of_own * own
                share_of_own *= scale
            met += share_of_own
        if GATED:
            # pairs * scores: gradients of the exponents of all pairs; first summed over the writers before a token.
            crossing = tl.dot(
                (pairs * scores).to(x.dtype), tl.where(written_before, 1.0, 0.0).to(x.dtype), input_precision=PRECISION
            )
        if CARRIED:
            if GATED:
                reading *= enter[:, None]
                writing *= leave[:, None]
                crossing += tl.sum(reading * x.to(tl.float32), 1)[:, None]
            dx += reading
            wrote = tl.sum(writing * c.to(tl.float32), 1)
            if SCALED:
                dscale_carried = wrote
                wrote *= scale
                writing *= scale[:, None]
            dc += writing
        if GATED:
            da_here = tl.sum(tl.where(reads_past, crossing, 0.0), 0)
            if CARRIED:
                da_here += tl.sum(tl.where(written_before, wrote[:, None], 0.0), 0)
                da_here += tl.sum(through, 0) * total
            tl.store(da + at_h, da_here, mask=valid)
        if SCALED:
            if CARRIED:
                dscale += dscale_carried
            if not SHIFT:
                dscale += dscale_own
            tl.store(dw + at_h, dscale, mask=valid)

    dscores = dscores.to(x.dtype)
    dx = tl.dot(dscores, c, acc=dx, input_precision=PRECISION)
    dc = tl.dot(tl.trans(dscores), x, acc=dc, input_precision=PRECISION)
    if not SHIFT:
        dx += met[:, None] * c.to(tl.float32)
        dc += met[:, None] * x.to(tl.float32)
    n = tl.arange(0, BLOCK_N)
    at = part.to(tl.int64) * d_s + b * d_b + t * d_l + group * d_g
    inside = n[None, :] < d_state
    # A reader's gradient belongs to the token that it read for.
    target = (start + source >= 0) & (start + source < length)
    tl.store(dq + at + source[:, None] * d_l + n[None, :], dx.to(dq.dtype.element_ty), mask=target[:, None] & inside)
    tl.store(dk + at + i[:, None] * d_l + n[None, :], dc.to(dk.dtype.element_ty), mask=valid[:, None] & inside)
