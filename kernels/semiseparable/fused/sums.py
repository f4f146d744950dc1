"""Sums of log-decays over chunks, which all other kernels read, and the gradients of the decays that they are made of.

Both take one chunk and some heads: tokens lie along one axis and heads along the other. What other kernels find out
about tokens lies in memory head by head, so that the tokens of a tile are neighbours.
"""

import triton
import triton.language as tl

from matmix.kernels.slots import located

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-151.0)
"""2 to this power is 0 in float32; a bound keeps sums finite when a decay of exactly 0 (log -inf) is given."""
HIGHEST = tl.constexpr(0.01 * 1.4426950408889634)
"""LARGEST_LOG_DECAY of matmix.kernels.checks: values on the device cannot be refused without waiting for it."""
UNIT = tl.constexpr(2.0**-8)
"""Sums of multiples of it are exact in float32: of 256 tokens at LOWEST they reach 2^24 units and no more."""


@triton.jit
def store_side(
    sums, a, a_b, a_l, a_h, b, t, i, head, heads, inside, REVERSE: tl.constexpr, GATED: tl.constexpr, C: tl.constexpr
):
    """Sums of one direction's log2 decays from its side of the chunk on; tokens along axis 0."""
    there = (head < heads)[None, :]
    if GATED:
        a += b * a_b + t * a_l
        decay = tl.load(a + i[:, None] * a_l + head[None, :] * a_h, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        # Comparisons, not minimum and maximum: those would swallow a NaN.
        decay = tl.where(decay < LOWEST, LOWEST, decay)
        decay = tl.where(decay > HIGHEST, HIGHEST, decay)
        coarse = tl.floor(decay * (1.0 / UNIT) + 0.5) * UNIT
        high = tl.cumsum(coarse, 0, reverse=REVERSE)
        low = tl.cumsum(decay - coarse, 0, reverse=REVERSE)
        if C.EXACT:
            tl.store(sums, high, mask=there)
            tl.store(sums + C.CHUNK, low, mask=there)
        else:
            tl.store(sums, high + low, mask=there)


@triton.jit(do_not_specialize=["seqlen", "per_row", "rows"])
def decay_sums(
    sums, triangle, a1, a1_b, a1_l, a1_h, a2, a2_b, a2_l, a2_h, table, seqlen, per_row, heads, rows, C: tl.constexpr
):
    """sums (slots, nheads, directions, FACTORS, CHUNK) float32: one or two floats of sums of log-decays. With TILE
    also `triangle` (TILE, TILE), 1 below the diagonal and else 0, of as many `rows`, by the last program."""
    slot = tl.program_id(0)
    head = (tl.program_id(1) * C.BLOCK_H + tl.arange(0, C.BLOCK_H)).to(tl.int64)
    if C.TILE:
        if slot == tl.num_programs(0) - 1:
            column = tl.arange(0, C.TILE)
            for row in range(rows):
                below = tl.where(column < row, 1.0, 0.0)
                tl.store(triangle + row * C.TILE + column, below.to(triangle.dtype.element_ty))
            return
    chunk, row, begin, length = located(slot, table, seqlen, per_row, C.PACKED)
    start = chunk * C.CHUNK
    if start >= length:
        return
    b = row.to(tl.int64)
    t = (begin + start).to(tl.int64)
    i = tl.arange(0, C.CHUNK)
    inside = (i < length - start)[:, None] & (head < heads)[None, :]
    side: tl.constexpr = C.FACTORS * C.CHUNK
    target = sums + (slot.to(tl.int64) * heads + head[None, :]) * ((2 if C.TWO else 1) * side) + i[:, None]
    store_side(target, a1, a1_b, a1_l, a1_h, b, t, i, head, heads, inside, C.REVERSE, C.GATED1, C)
    if C.TWO:
        store_side(target + side, a2, a2_b, a2_l, a2_h, b, t, i, head, heads, inside, True, C.GATED2, C)


@triton.jit
def load_parts(x, part_stride, at, mask, PARTS: tl.constexpr):
    """The sum of what several programs found for the same tokens and heads, in a fixed order."""
    total = tl.load(x + at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * part_stride + at, mask=mask, other=0.0)
    return total


@triton.jit
def side_decay_gradients(
    da, dw, pairs, scales, crossed, entered, read, wrote, through, part_stride, tile_stride, a, a_b, a_l, a_h, w, w_b,
    w_l, w_h, b, seqlen, t, of_chunk, i, left, head, heads, tokens, REVERSE: tl.constexpr, GATED: tl.constexpr,
    SCALED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """da and dw of one direction, for tokens t + i of row b (`left` of them in the chunk) of heads `head`; heads lie
    along axis 0.

    The gradient of a token's log-decay is the sum over everything whose decay it takes part in: the pairs of a reader
    and a writer on either side of it inside its tile, those with its tile's writers before it and readers in the other
    tile, those with its tile's readers after it and writers in the other tile; and the same with other chunks: those
    who read the entering state after it, those who wrote to the leaving state before it, and what passes through.
    """
    there = (head < heads)[:, None]
    mask = (i < left)[None, :] & there
    place = b * seqlen + t
    head_place = head.to(tl.int64)[:, None] * tokens + place
    at = head_place + i[None, :]
    to = (place + i)[None, :] * heads + head[:, None]
    if SCALED:
        dscale = tl.load(scales + at, mask=mask, other=0.0)
        if C.STATES:
            dscale += load_parts(wrote, part_stride, at, mask, C.PARTS)
        tl.store(dw + to, dscale, mask=mask)
    if GATED:
        # Loaded from where they are to be counted: sums with a token's own share taken off again would lose what
        # strong decays leave.
        gradient = tl.load(pairs + at, mask=mask, other=0.0)
        after = i + ((-1 if REVERSE else 1) if C.SHIFT else 0)
        before = i + (1 if REVERSE else -1)
        is_after = ((after >= 0) & (after < left))[None, :] & there
        is_before = ((before >= 0) & (before < left))[None, :] & there
        at_after = head_place + after[None, :]
        at_before = head_place + before[None, :]
        if C.CHUNK > C.TILE:
            # The tile that the direction comes from writes, and the other one, where there is one, reads.
            ahead, behind = (i >= C.TILE)[None, :], (i < C.TILE)[None, :]
            reads = is_after & (((after < C.TILE) & (left > C.TILE)) if REVERSE else after >= C.TILE)[None, :]
            reading = tl.cumsum(tl.load(entered + at_after, mask=reads, other=0.0), 1, reverse=not REVERSE)
            gradient += tl.where(behind if REVERSE else ahead, reading, 0.0)
            writes = is_before & (before >= C.TILE if REVERSE else before < C.TILE)[None, :]
            writing = tl.cumsum(tl.load(crossed + at_before, mask=writes, other=0.0), 1, reverse=REVERSE)
            gradient += tl.where(ahead if REVERSE else behind, writing, 0.0)
        if C.STATES:
            reading = load_parts(read, part_stride, at_after, is_after, C.PARTS)
            gradient += tl.cumsum(reading, 1, reverse=not REVERSE)
            writing = load_parts(wrote, part_stride, at_before, is_before, C.PARTS)
            if SCALED:
                at_w = before[None, :] * w_l + head[:, None] * w_h
                writing *= tl.load(w + b * w_b + t * w_l + at_w, mask=is_before, other=0.0).to(tl.float32)
            gradient += tl.cumsum(writing, 1, reverse=REVERSE)
            for tile in tl.static_range(C.CHUNK // C.TILE):
                is_tile = (head < heads) & (tile * C.TILE < left)
                of_tile = through + of_chunk + tile * heads
                gradient += load_parts(of_tile, tile_stride, head, is_tile, C.PARTS)[:, None]
        # Larger decays are taken as the largest one, whatever they are.
        a += b * a_b + t * a_l
        decay = tl.load(a + i[None, :] * a_l + head[:, None] * a_h, mask=mask, other=0.0).to(tl.float32) * LOG2_E
        tl.store(da + to, tl.where(decay > HIGHEST * 1.000001, 0.0, gradient), mask=mask)


@triton.jit(do_not_specialize=["per_row", "tile_stride"])
def decay_gradients(
    da1, dw1, pairs1, scales1, read1, wrote1, through1, da2, dw2, pairs2, scales2, read2, wrote2, through2, crossed,
    entered, part_stride, tile_stride, a1, a1_b, a1_l, a1_h, a2, a2_b, a2_l, a2_h, w1, w1_b, w1_l, w1_h, w2, w2_b, w2_l,
    w2_h, table, seqlen, per_row, tokens, heads, C: tl.constexpr,
):  # fmt: skip
    """Gradients of decays and input scales of one chunk, from what `pair_gradients` and `vector_gradients` (with
    STATES, in PARTS blocks of d_state) found out about its tokens."""
    slot = tl.program_id(0)
    head = tl.program_id(1) * C.BLOCK_H + tl.arange(0, C.BLOCK_H)
    chunk, row, begin, length = located(slot, table, seqlen, per_row, C.PACKED)
    left = tl.minimum(length - chunk * C.CHUNK, C.CHUNK)
    if left <= 0:
        return
    if C.WHOLE:
        tl.assume(left == C.CHUNK)
    b = row.to(tl.int64)
    t = (begin + chunk * C.CHUNK).to(tl.int64)
    i = tl.arange(0, C.CHUNK)
    of_chunk = slot.to(tl.int64) * (C.CHUNK // C.TILE) * heads
    side_decay_gradients(
        da1, dw1, pairs1, scales1, crossed, entered, read1, wrote1, through1, part_stride, tile_stride, a1, a1_b, a1_l,
        a1_h, w1, w1_b, w1_l, w1_h, b, seqlen, t, of_chunk, i, left, head, heads, tokens, C.REVERSE, C.GATED1,
        C.SCALED1, C,
    )  # fmt: skip
    if C.TWO:
        side_decay_gradients(
            da2, dw2, pairs2, scales2, crossed, entered, read2, wrote2, through2, part_stride, tile_stride, a2, a2_b,
            a2_l, a2_h, w2, w2_b, w2_l, w2_h, b, seqlen, t, of_chunk, i, left, head, heads, tokens, True, C.GATED2,
            C.SCALED2, C,
        )  # fmt: skip
