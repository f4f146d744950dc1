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
    decay_matrix,
    load_factor,
    load_rows,
    load_state,
    log_decays,
    shifted,
    side_scores,
    state_dot,
    two_floats,
)
from matmix.kernels.slots import first_slot, locate


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
def read_state(
    rows, rows_l, from_i, inside_i, state, vectors, at_vector, d_state, p0, headdim,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, N_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What rows read from the state at their chunk's edge (ROWS, BLOCK_P), and from its sums (ROWS,)."""
    read = tl.zeros((ROWS, BLOCK_P), tl.float32)
    held = tl.zeros((ROWS,), tl.float32)
    for block in range(N_BLOCKS):
        # The rows come from a cache: kept in registers over all heads they would crowd out the matrix.
        x = load_rows(rows, rows_l, from_i, inside_i, block * BLOCK_N, d_state, BLOCK_N)
        h = load_state(state, block * BLOCK_N, d_state, p0, headdim, BLOCK_N, BLOCK_P)
        read = state_dot(x, h, read, PRECISION)
        if VECTOR:
            n = block * BLOCK_N + tl.arange(0, BLOCK_N)
            z = tl.load(vectors + at_vector + n, mask=n < d_state, other=0.0)
            held += tl.sum(x.to(tl.float32) * z[None, :], 1)
    return read, held


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row", "self_weight", "eps"])
def mix(
    y, y_b, y_l, y_h, row_sums, rest,
    v1, v2, v_b, v_l, v_h,
    row1, row1_b, row1_l, row1_g, col1, col1_b, col1_l, col1_g,
    row2, row2_b, row2_l, row2_g, col2, col2_b, col2_l, col2_g,
    a1, a1_b, a1_l, a1_h, a2, a2_b, a2_l, a2_h, w1, w1_b, w1_l, w1_h, w2, w2_b, w2_l, w2_h, d, d_b, d_l, d_h,
    states, vectors,
    cu_seqlens, documents, seqlen, per_row, heads, share, d_state, headdim, self_weight, eps,
    TWO: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr, SHIFT: tl.constexpr,
    GATED1: tl.constexpr, GATED2: tl.constexpr, SCALED1: tl.constexpr, SCALED2: tl.constexpr,
    DIAGONAL: tl.constexpr, CARRIED: tl.constexpr, NORMALIZE: tl.constexpr, REST: tl.constexpr, COMBINE: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    N_BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
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
    first = i[:, None] > j[None, :] if REVERSE == TRANSPOSED else i[:, None] < j[None, :]

    # The transposed product has q in its columns. With SHIFT token t reads with the q of its neighbour.
    if TRANSPOSED:
        i1, inside_i1 = i, valid_i
        j1, inside_j1 = shifted(j, start, length, REVERSE, SHIFT)
        i2, inside_i2 = i, valid_i
        j2, inside_j2 = shifted(j, start, length, True, SHIFT)
    else:
        i1, inside_i1 = shifted(i, start, length, REVERSE, SHIFT)
        j1, inside_j1 = j, valid_j
        i2, inside_i2 = shifted(i, start, length, True, SHIFT)
        j2, inside_j2 = j, valid_j
    at_row1 = row1 + b * row1_b + t * row1_l + group * row1_g
    at_row2 = row2 + b * row2_b + t * row2_l + group * row2_g
    scores = side_scores(
        at_row1, row1_l, col1 + b * col1_b + t * col1_l + group * col1_g, col1_l,
        i1, inside_i1, j1, inside_j1, d_state, ROWS, CHUNK, BLOCK_N, N_BLOCKS, PRECISION,
    )  # fmt: skip
    if not SHIFT:
        own1 = tl.sum(tl.where(diagonal, scores, 0.0), 1)
    if TWO:
        scores2 = side_scores(
            at_row2, row2_l, col2 + b * col2_b + t * col2_l + group * col2_g, col2_l,
            i2, inside_i2, j2, inside_j2, d_state, ROWS, CHUNK, BLOCK_N, N_BLOCKS, PRECISION,
        )  # fmt: skip
        if not SHIFT:
            own2 = tl.sum(tl.where(diagonal, scores2, 0.0), 1)
        scores = tl.where(first, scores, scores2)
        scores = tl.where(diagonal, 0.0, scores)
    else:
        scores = tl.where(first, scores, 0.0)

    for step in range(HEADS):
        head = h0 + step
        at_v = b * v_b + t * v_l + head * v_h
        values = load_rows(v1 + at_v, v_l, j, valid_j, p0, headdim, BLOCK_P)
        matrix = scores
        if GATED1 or GATED2:
            row_high, row_low, col_high, col_low, factor1 = side_exponents(
                a1 + b * a1_b + t * a1_l + head * a1_h if GATED1 else a1, a1_l, start, r0, length,
                REVERSE, SHIFT, TRANSPOSED, GATED1, CHUNK, ROWS,
            )  # fmt: skip
            decays = decay_matrix(row_high, row_low, col_high, col_low, EXACT)
            if TWO:
                row_high, row_low, col_high, col_low, factor2 = side_exponents(
                    a2 + b * a2_b + t * a2_l + head * a2_h if GATED2 else a2, a2_l, start, r0, length,
                    True, SHIFT, TRANSPOSED, GATED2, CHUNK, ROWS,
                )  # fmt: skip
                decays = tl.where(first, decays, decay_matrix(row_high, row_low, col_high, col_low, EXACT))
            matrix *= decays
        # The diagonal: each direction's own terms (without shift), then the given one.
        own = tl.zeros((ROWS,), tl.float32)
        also = tl.zeros((ROWS,), tl.float32)
        if not SHIFT:
            own += own1
            if TWO:
                also += own2
        if SCALED1:
            at_w = w1 + b * w1_b + t * w1_l + head * w1_h
            scale1_i = load_factor(at_w, w1_l, i, valid_i)
            own *= scale1_i
            scale = scale1_i[:, None] if TRANSPOSED else load_factor(at_w, w1_l, j, valid_j)[None, :]
            matrix *= tl.where(first, scale, 1.0) if TWO else scale
        if SCALED2:
            at_w = w2 + b * w2_b + t * w2_l + head * w2_h
            scale2_i = load_factor(at_w, w2_l, i, valid_i)
            also *= scale2_i
            scale = scale2_i[:, None] if TRANSPOSED else load_factor(at_w, w2_l, j, valid_j)[None, :]
            matrix *= tl.where(first, 1.0, scale)
        own *= self_weight
        also *= self_weight
        given = tl.zeros((ROWS,), tl.float32)
        if DIAGONAL:
            given += load_factor(d + b * d_b + head * d_h, d_l, t + i, valid_i)

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
                values = load_rows(v2 + at_v, v_l, j, valid_j, p0, headdim, BLOCK_P)
            half = tl.where(diagonal, (also + in_both)[:, None], tl.where(first, 0.0, matrix))
            out2 = tl.dot(half.to(values.dtype), values, input_precision=PRECISION)

        if CARRIED:
            directions: tl.constexpr = 2 if TWO else 1
            place = first_slot(document, begin, per_row, CHUNK, PACKED) + chunk
            which = (place.to(tl.int64) * heads + head) * directions
            read, held = read_state(
                at_row1, row1_l, i1, inside_i1, states + which * d_state * headdim, vectors, which * d_state,
                d_state, p0, headdim, NORMALIZE, ROWS, BLOCK_N, N_BLOCKS, BLOCK_P, PRECISION,
            )  # fmt: skip
            if GATED1 or GATED2:
                read *= factor1[:, None]
                held *= factor1
            if TRANSPOSED and SCALED1:
                read *= scale1_i[:, None]
            out += read
            if NORMALIZE:
                sums += held
            if TWO:
                which += 1
                read, held = read_state(
                    at_row2, row2_l, i2, inside_i2, states + which * d_state * headdim, vectors, which * d_state,
                    d_state, p0, headdim, NORMALIZE, ROWS, BLOCK_N, N_BLOCKS, BLOCK_P, PRECISION,
                )  # fmt: skip
                if GATED1 or GATED2:
                    read *= factor2[:, None]
                    held *= factor2
                if TRANSPOSED and SCALED2:
                    read *= scale2_i[:, None]
                if COMBINE == "add":
                    out += read
                else:
                    out2 += read
                if NORMALIZE:
                    sums += held

        if NORMALIZE:
            out /= (sums + eps)[:, None]
            if p0 == 0:
                tl.store(row_sums + (b * seqlen + t + i) * heads + head, sums, mask=valid_i)
        p = p0 + tl.arange(0, BLOCK_P)
        target = y + b * y_b + t * y_l + head * y_h + i[:, None] * y_l + p[None, :]
        inside = valid_i[:, None] & (p[None, :] < headdim)
        if COMBINE == "add":
            rounded = out.to(y.dtype.element_ty)
            tl.store(target, rounded, mask=inside)
            if REST:
                at_rest = rest + b * y_b + t * y_l + head * y_h + i[:, None] * y_l + p[None, :]
                tl.store(at_rest, (out - rounded.to(tl.float32)).to(y.dtype.element_ty), mask=inside)
        elif TRANSPOSED:
            tl.store(target, (out + out2).to(y.dtype.element_ty), mask=inside)
        elif COMBINE == "concat":
            tl.store(target, out.to(y.dtype.element_ty), mask=inside)
            tl.store(target + headdim, out2.to(y.dtype.element_ty), mask=inside)
        else:
            out *= out2
            if DIAGONAL:
                mine = load_rows(v1 + at_v, v_l, i, valid_i, p0, headdim, BLOCK_P)
                out += given[:, None] * mine.to(tl.float32)
            tl.store(target, out.to(y.dtype.element_ty), mask=inside)
