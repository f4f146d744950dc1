"""Gradients through the states at a chunk's edges: of q, k, log-decays and input scales, one direction at a time.

One program takes one chunk and some heads of a group, which q and k are summed over.

The gradient of a token's log-decay is the sum over everything whose decay it takes part in; here, the entering state
for those who read after it, the leaving state for those who wrote before it, and the state that passes the chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused.layout import load_factor, load_rows, load_state, log_decays, shifted, state_dot
from matmix.kernels.slots import first_slot, locate


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row", "direction"])
def state_gradients(
    dq, dk, d_s, d_b, d_l, d_g, dq_pairs, dk_pairs, da, dw, f_s, da_pairs, dw_pairs,
    dy, dy_b, dy_l, dy_h, v, v_b, v_l, v_h, q, q_b, q_l, q_g, k, k_b, k_l, k_g,
    a, a_b, a_l, a_h, w, w_b, w_l, w_h, u, u_b, u_l, u_h,
    states, vectors, leaving, leaving_vectors,
    cu_seqlens, documents, seqlen, per_row, heads, share, d_state, headdim, direction,
    directions: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    ADD: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, P_BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What goes through the states at a chunk's edges, for BLOCK_N elements of q and k, added to what
    `pair_gradients` found (with ADD, else dq and dk hold more parts). da and dw get a part for each such block."""
    slot = tl.program_id(0)
    h0 = tl.program_id(1) * HEADS
    n0 = tl.program_id(2) * BLOCK_N
    group = h0 // share
    part = h0 % share // HEADS
    document, chunk, batch_row, begin, length = locate(slot, cu_seqlens, documents, seqlen, per_row, CHUNK, PACKED)
    start = chunk * CHUNK
    if start >= length:
        return
    b = batch_row.to(tl.int64)
    t = (begin + start).to(tl.int64)
    i = tl.arange(0, CHUNK)
    n = n0 + tl.arange(0, BLOCK_N)
    valid = start + i < length
    source, readable = shifted(i, start, length, REVERSE, SHIFT)
    at_q = q + b * q_b + t * q_l + group * q_g
    at_k = k + b * k_b + t * k_l + group * k_g
    place = first_slot(document, begin, per_row, CHUNK, PACKED) + chunk
    dx = tl.zeros((CHUNK, BLOCK_N), tl.float32)
    dc = tl.zeros((CHUNK, BLOCK_N), tl.float32)

    for step in range(HEADS):
        head = h0 + step
        at_y = dy + b * dy_b + t * dy_l + head * dy_h
        at_v = v + b * v_b + t * v_l + head * v_h
        which = (place.to(tl.int64) * heads + head) * directions + direction
        reading = tl.zeros((CHUNK, BLOCK_N), tl.float32)
        writing = tl.zeros((CHUNK, BLOCK_N), tl.float32)
        through = tl.zeros((BLOCK_N,), tl.float32)
        for block in range(P_BLOCKS):
            p0 = block * BLOCK_P
            enters = load_state(states + which * d_state * headdim, n0, d_state, p0, headdim, BLOCK_N, BLOCK_P)
            leaves = load_state(leaving + which * d_state * headdim, n0, d_state, p0, headdim, BLOCK_N, BLOCK_P)
            if GATED:
                through += tl.sum(enters.to(tl.float32) * leaves.to(tl.float32), 1)
            grad = load_rows(at_y, dy_l, i, valid, p0, headdim, BLOCK_P)
            reading = state_dot(grad, tl.trans(enters), reading, PRECISION)
            value = load_rows(at_v, v_l, i, valid, p0, headdim, BLOCK_P)
            writing = state_dot(value, tl.trans(leaves), writing, PRECISION)
        if NORMALIZE:
            # The sum over a row is the product with one more channel of v that holds ones.
            enters_sum = tl.load(vectors + which * d_state + n, mask=n < d_state, other=0.0)
            leaves_sum = tl.load(leaving_vectors + which * d_state + n, mask=n < d_state, other=0.0)
            reading += load_factor(u + b * u_b + head * u_h, u_l, t + i, valid)[:, None] * enters_sum[None, :]
            writing += tl.where(valid[:, None], leaves_sum[None, :], 0.0)
            through += enters_sum * leaves_sum
        if GATED:
            decay = log_decays(a + b * a_b + head * a_h, a_l, t + i, valid, GATED)
            write = tl.cumsum(decay, 0, reverse=REVERSE)
            total = tl.sum(decay, 0)
            reading *= tl.exp2((write - decay if SHIFT else write).to(tl.float32))[:, None]
            writing *= tl.exp2((total - write).to(tl.float32))[:, None]
        # q and k come from a cache: kept in registers over all heads they would not fit.
        if GATED:
            x = load_rows(at_q, q_l, source, readable, n0, d_state, BLOCK_N)
            read = tl.sum(reading * x.to(tl.float32), 1)
        dx += reading
        at_h = (b * seqlen + t + i) * heads + head
        at_f = tl.program_id(2).to(tl.int64) * f_s + at_h
        first_block = valid & (n0 == 0)
        if GATED or SCALED:
            c = load_rows(at_k, k_l, i, valid, n0, d_state, BLOCK_N)
            wrote = tl.sum(writing * c.to(tl.float32), 1)
        if SCALED:
            scale = load_factor(w + b * w_b + head * w_h, w_l, t + i, valid)
            before = tl.load(dw_pairs + at_h, mask=first_block, other=0.0)
            tl.store(dw + at_f, before + wrote, mask=valid)
            wrote *= scale
            writing *= scale[:, None]
        dc += writing
        if GATED:
            # For each token (column): those who read after it, and those who wrote before it. No differences here.
            if REVERSE:
                passes = tl.where(i[:, None] > i[None, :], wrote[:, None], 0.0)
                passes = tl.where(i[:, None] <= i[None, :] - (1 if SHIFT else 0), read[:, None], passes)
            else:
                passes = tl.where(i[:, None] < i[None, :], wrote[:, None], 0.0)
                passes = tl.where(i[:, None] >= i[None, :] + (1 if SHIFT else 0), read[:, None], passes)
            passed = tl.sum(passes, 0) + tl.sum(through, 0) * tl.exp2(total.to(tl.float32))
            before = tl.load(da_pairs + at_h, mask=first_block, other=0.0)
            tl.store(da + at_f, before + passed, mask=valid)

    at = part.to(tl.int64) * d_s + b * d_b + t * d_l + group * d_g
    inside = n[None, :] < d_state
    # A reader's gradient belongs to the token whose q it read with.
    target = (start + source >= 0) & (start + source < length)
    at_x = at + source[:, None] * d_l + n[None, :]
    at_c = at + i[:, None] * d_l + n[None, :]
    if ADD:
        dx += tl.load(dq_pairs + at_x, mask=target[:, None] & inside, other=0.0)
    tl.store(dq + at_x, dx.to(dq.dtype.element_ty), mask=target[:, None] & inside)
    if ADD:
        dc += tl.load(dk_pairs + at_c, mask=valid[:, None] & inside, other=0.0)
    tl.store(dk + at_c, dc.to(dk.dtype.element_ty), mask=valid[:, None] & inside)
