"""Products with the mixer matrix: y = M v of the forward pass, and dv = M^T dy of the backward pass.

One program makes some rows of the matrix of one chunk, for some heads of a group: scores q k^T below and above
the diagonal from the two directions (computed once for all its heads), times decays and input scales, with the
whole diagonal added; multiplies it with the chunk's values; and adds what the states that enter the chunk from
either side hold for its rows. Nothing is flipped, and y is written once.

The transposed product is the same with rows and columns, read and write decays exchanged, and the cotangents of
the states that leave the chunk in place of the states that enter it.
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
def side_scores(
    row, row_l, col, col_l, start, r0, length, d_state,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, TRANSPOSED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One direction: its vectors of the tile's rows (ROWS, BLOCK_N), its scores (ROWS, CHUNK) on its own side of
    the diagonal, and its scores of tokens with themselves (ROWS,), which count only without shift."""
    i = r0 + tl.arange(0, ROWS)
    j = tl.arange(0, CHUNK)
    # The shift: what token t reads, q of its neighbour reads.
    moved = (1 if REVERSE else -1) if SHIFT else 0
    from_i = i if TRANSPOSED else i + moved
    from_j = j + moved if TRANSPOSED else j
    inside_i = (start + i < length) & (start + from_i >= 0) & (start + from_i < length)
    inside_j = (start + j < length) & (start + from_j >= 0) & (start + from_j < length)
    x = load_rows(row, row_l, from_i, inside_i, d_state, BLOCK_N)
    c = load_rows(col, col_l, from_j, inside_j, d_state, BLOCK_N)
    scores = tl.dot(x, tl.trans(c), input_precision=PRECISION)
    own = tl.sum(tl.where(i[:, None] == j[None, :], scores, 0.0), 1)
    if REVERSE == TRANSPOSED:
        scores = tl.where(i[:, None] > j[None, :], scores, 0.0)
    else:
        scores = tl.where(i[:, None] < j[None, :], scores, 0.0)
    return x, scores, own


@triton.jit
def side_exponents(
    a, a_l, start, r0, length,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, TRANSPOSED: tl.constexpr, GATED: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Log2 decays of one direction: parts that add up to the decay between a row's and a column's token, as two
    floats each, and the decay between a row's token and the chunk's edge that the state uses."""
    i = r0 + tl.arange(0, ROWS)
    j = tl.arange(0, CHUNK)
    decay_j = log_decays(a, a_l, j, start + j < length, GATED)
    decay_i = log_decays(a, a_l, i, start + i < length, GATED)
    if REVERSE:
        write_j = tl.cumsum(decay_j, 0, reverse=True)
        write_i = tl.cumsum(decay_i, 0, reverse=True) + tl.sum(tl.where(j >= r0 + ROWS, decay_j, 0.0), 0)
    else:
        write_j = tl.cumsum(decay_j, 0)
        write_i = tl.cumsum(decay_i, 0) + tl.sum(tl.where(j < r0, decay_j, 0.0), 0)
    if TRANSPOSED:
        row = -write_i
        col = write_j - decay_j if SHIFT else write_j
        state = tl.sum(decay_j, 0) - write_i
    else:
        row = write_i - decay_i if SHIFT else write_i
        col = -write_j
        state = row
    row_high, row_low = two_floats(row)
    col_high, col_low = two_floats(col)
    return row_high, row_low, col_high, col_low, tl.exp2(state.to(tl.float32))


@triton.jit
def exponent_matrix(row_high, row_low, col_high, col_low):
    return (row_high[:, None] + col_high[None, :]) + (row_low[:, None] + col_low[None, :])


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row", "self_weight", "eps"])
def mix(
    y, y_b, y_l, y_h, row_sums,
    v1, v2, v_b, v_l, v_h,
    row1, row1_b, row1_l, row1_g, col1, col1_b, col1_l, col1_g,
    row2, row2_b, row2_l, row2_g, col2, col2_b, col2_l, col2_g,
    a1, a1_b, a1_l, a1_h, a2, a2_b, a2_l, a2_h, w1, w1_b, w1_l, w1_h, w2, w2_b, w2_l, w2_h, d, d_b, d_l, d_h,
    states, vectors,
    cu_seqlens, documents, seqlen, per_row, heads, share, d_state, headdim, self_weight, eps,
    TWO: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr, SHIFT: tl.constexpr,
    GATED1: tl.constexpr, GATED2: tl.constexpr, SCALED1: tl.constexpr, SCALED2: tl.constexpr,
    DIAGONAL: tl.constexpr, CARRIED: tl.constexpr, NORMALIZE: tl.constexpr, COMBINE: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = M v (or M^T v1 + M^T v2 per direction, for the cotangents of a concatenation) of ROWS tokens, HEADS
    heads and BLOCK_P channels. The first direction runs backward if REVERSE; a second one always does."""
    tiles: tl.constexpr = CHUNK // ROWS
    slot = tl.program_id(0) // tiles
    r0 = tl.program_id(0) % tiles * ROWS
    h0 = tl.program_id(1) * HEADS
    p0 = tl.program_id(2) * BLOCK_P
    group = h0 // share
    document, chunk, batch_row, begin, length = locate(slot, cu_seqlens, documents, seqlen, per_row, CHUNK, PACKED)
    start = chunk * CHUNK
    if start + r0 >= length:
        return
    b = batch_row.to(tl.int64)
    t = (begin + start).to(tl.int64)
    i = r0 + tl.arange(0, ROWS)
    j = tl.arange(0, CHUNK)
    valid_i = start + i < length
    valid_j = start + j < length
    diagonal = i[:, None] == j[None, :]
    # Which of the strict triangles belongs to the first direction.
    if REVERSE == TRANSPOSED:
        first = i[:, None] > j[None, :]
    else:
        first = i[:, None] < j[None, :]

    x1, scores, own1 = side_scores(
        row1 + b * row1_b + t * row1_l + group * row1_g, row1_l, col1 + b * col1_b + t * col1_l + group * col1_g, col1_l,
        start, r0, length, d_state, REVERSE, SHIFT, TRANSPOSED, CHUNK, ROWS, BLOCK_N, PRECISION,
    )  # fmt: skip
    if TWO:
        x2, scores2, own2 = side_scores(
            row2 + b * row2_b + t * row2_l + group * row2_g, row2_l,
            col2 + b * col2_b + t * col2_l + group * col2_g, col2_l,
            start, r0, length, d_state, True, SHIFT, TRANSPOSED, CHUNK, ROWS, BLOCK_N, PRECISION,
        )  # fmt: skip
        scores += scores2

    for step in range(HEADS):
        head = h0 + step
        at_v = b * v_b + t * v_l + head * v_h + p0
        values = load_rows(v1 + at_v, v_l, j, valid_j, headdim - p0, BLOCK_P)
        matrix = scores
        if GATED1 or GATED2:
            row_high, row_low, col_high, col_low, factor1 = side_exponents(
                a1 + b * a1_b + t * a1_l + head * a1_h if GATED1 else a1, a1_l, start, r0, length,
                REVERSE, SHIFT, TRANSPOSED, GATED1, CHUNK, ROWS,
            )  # fmt: skip
            exponents = exponent_matrix(row_high, row_low, col_high, col_low)
            if TWO:
                row_high, row_low, col_high, col_low, factor2 = side_exponents(
                    a2 + b * a2_b + t * a2_l + head * a2_h if GATED2 else a2, a2_l, start, r0, length,
                    True, SHIFT, TRANSPOSED, GATED2, CHUNK, ROWS,
                )  # fmt: skip
                exponents = tl.where(first, exponents, exponent_matrix(row_high, row_low, col_high, col_low))
            # Outside the triangles the scores are 0 but the exponents may be large. (A NaN stays one.)
            matrix *= tl.exp2(tl.where(exponents > BEYOND, 0.0, exponents))
        # The diagonal: each direction's own terms (without shift), then the given one.
        own = tl.zeros((ROWS,), tl.float32)
        also = tl.zeros((ROWS,), tl.float32)
        if not SHIFT:
            own += own1
            if TWO:
                also += own2
        if SCALED1:
            at_w = w1 + b * w1_b + t * w1_l + head * w1_h
            scale1_i = tl.load(at_w + i * w1_l, mask=valid_i, other=0.0).to(tl.float32)
            own *= scale1_i
            if TRANSPOSED:
                scale = scale1_i[:, None]
            else:
                scale = tl.load(at_w + j * w1_l, mask=valid_j, other=0.0).to(tl.float32)[None, :]
            matrix *= tl.where(first, scale, 1.0) if TWO else scale
        if SCALED2:
            at_w = w2 + b * w2_b + t * w2_l + head * w2_h
            scale2_i = tl.load(at_w + i * w2_l, mask=valid_i, other=0.0).to(tl.float32)
            also *= scale2_i
            if TRANSPOSED:
                scale = scale2_i[:, None]
            else:
                scale = tl.load(at_w + j * w2_l, mask=valid_j, other=0.0).to(tl.float32)[None, :]
            matrix *= tl.where(first, 1.0, scale)
        own *= self_weight
        also *= self_weight
        given = tl.zeros((ROWS,), tl.float32)
        if DIAGONAL:
            given += tl.load(d + b * d_b + (t + i) * d_l + head * d_h, mask=valid_i, other=0.0).to(tl.float32)

        if COMBINE == "add":
            matrix = tl.where(diagonal, (own + also + given)[:, None], matrix)
            out = tl.dot(matrix.to(values.dtype), values, input_precision=PRECISION)
            if NORMALIZE:
                sums = tl.sum(matrix, 1)
        else:
            # Where the halves are multiplied the given diagonal is added at the end.
            in_both = given if COMBINE == "concat" else tl.zeros((ROWS,), tl.float32)
            half = tl.where(diagonal, (own + in_both)[:, None], tl.where(first, matrix, 0.0))
            out = tl.dot(half.to(values.dtype), values, input_precision=PRECISION)
            if TRANSPOSED:
                values = load_rows(v2 + at_v, v_l, j, valid_j, headdim - p0, BLOCK_P)
            half = tl.where(diagonal, (also + in_both)[:, None], tl.where(first, 0.0, matrix))
            out2 = tl.dot(half.to(values.dtype), values, input_precision=PRECISION)

        if CARRIED:
            n = tl.arange(0, BLOCK_N)
            p = tl.arange(0, BLOCK_P)
            directions: tl.constexpr = 2 if TWO else 1
            place = first_slot(document, begin, per_row, CHUNK, PACKED) + chunk
            which = (place.to(tl.int64) * heads + head) * directions
            element = n[:, None] * headdim + p0 + p[None, :]
            in_state = (n[:, None] < d_state) & (p0 + p[None, :] < headdim)
            state = tl.load(states + which * d_state * headdim + element, mask=in_state, other=0.0).to(x1.dtype)
            read = tl.dot(x1, state, input_precision=PRECISION)
            if GATED1 or GATED2:
                read *= factor1[:, None]
            if TRANSPOSED and SCALED1:
                read *= scale1_i[:, None]
            out += read
            if NORMALIZE:
                z = tl.load(vectors + which * d_state + n, mask=n < d_state, other=0.0)
                held = tl.sum(x1.to(tl.float32) * z[None, :], 1)
                sums += held * factor1 if (GATED1 or GATED2) else held
            if TWO:
                which += 1
                state = tl.load(states + which * d_state * headdim + element, mask=in_state, other=0.0).to(x2.dtype)
                read = tl.dot(x2, state, input_precision=PRECISION)
                if GATED1 or GATED2:
                    read *= factor2[:, None]
                if TRANSPOSED and SCALED2:
                    read *= scale2_i[:, None]
                if COMBINE == "add":
                    out += read
                else:
                    out2 += read
                if NORMALIZE:
                    z = tl.load(vectors + which * d_state + n, mask=n < d_state, other=0.0)
                    held = tl.sum(x2.to(tl.float32) * z[None, :], 1)
                    sums += held * factor2 if (GATED1 or GATED2) else held

        if NORMALIZE:
            out /= (sums + eps)[:, None]
            if p0 == 0:
                tl.store(row_sums + (b * seqlen + t + i) * heads + head, sums, mask=valid_i)
        p = p0 + tl.arange(0, BLOCK_P)
        target = y + b * y_b + t * y_l + head * y_h + i[:, None] * y_l + p[None, :]
        inside = valid_i[:, None] & (p[None, :] < headdim)
        if COMBINE == "add":
            tl.store(target, out.to(y.dtype.element_ty), mask=inside)
        elif TRANSPOSED:
            tl.store(target, (out + out2).to(y.dtype.element_ty), mask=inside)
        elif COMBINE == "concat":
            tl.store(target, out.to(y.dtype.element_ty), mask=inside)
            tl.store(target + headdim, out2.to(y.dtype.element_ty), mask=inside)
        else:
            out *= out2
            if DIAGONAL:
                mine = load_rows(v1 + at_v, v_l, i, valid_i, headdim - p0, BLOCK_P)
                out += given[:, None] * mine.to(tl.float32)
            tl.store(target, out.to(y.dtype.element_ty), mask=inside)
