"""Gradients of q and k, and through the states at a chunk's edges those of log-decays and input scales, all directions
in one launch.

One program takes one tile, one direction, either its readers (q) or its writers (k), and some heads of a group, which
q and k are summed over. Readers meet the state that enters the chunk, writers the cotangent of the one that leaves it,
and both the other tokens of the chunk by the gradient of the scores, which pairs.py has made.
"""

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused import layout
from matmix.kernels.slots import located


@triton.jit
def load_vector(vector, there, n0, C: tl.constexpr):
    """BLOCK_N elements of a state that holds sums over rows."""
    n = n0 + tl.arange(0, C.BLOCK_N)
    return tl.load(vector + n, mask=(n < C.D_STATE) & there, other=0.0)


@triton.jit
def passed_through(entering, leaving, there, first, ROWS: tl.constexpr, C: tl.constexpr):
    """Returns what passes through a whole chunk, before its decay: the product of the state that enters and the
    cotangent of the one that leaves; of ROWS of their rows."""
    total = 0.0
    for p0 in tl.static_range(0, C.HEADDIM, C.BLOCK_P):
        at, inside = layout.state_places(first, p0, ROWS, C)
        h = tl.load(entering + at, mask=inside & there, other=0.0).to(tl.float32)
        total += tl.sum(h * tl.load(leaving + at, mask=inside & there, other=0.0).to(tl.float32))
    return total


@triton.jit
def one_side(x1, x2, second, TWO: tl.constexpr):
    """The pointer, stride or flag of the second direction, or that of the first one."""
    return tl.where(second, x2, x1) if TWO else x1


@triton.jit
def add_product(acc, matrix, x, PRECISION: tl.constexpr):
    """acc + matrix x, the matrix rounded to x's dtype. One in single precision where x is in half precision is split in
    two: where rows are divided by their sums, most of what is added up here cancels."""
    high = matrix.to(x.dtype)
    acc = tl.dot(high, x, acc=acc, input_precision=PRECISION)
    if matrix.dtype != x.dtype:
        acc = tl.dot((matrix - high.to(tl.float32)).to(x.dtype), x, acc=acc)
    return acc


@triton.jit
def side_gradients(
    vector, decay_parts, through, rows, rows_l, rows_h, u, u_l, u_h, w, w_l, w_h, sums, states, vectors, others,
    other_vectors, h0, r0, left, tokens, step, reverse, gated, scaled, there, meets, n0, directions: tl.constexpr,
    WRITES: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradient (TILE, BLOCK_N) of q of the readers (or with WRITES of k of the writers) of one direction, from the
    `rows` dy (v), and `states` that are `there`. `decay_parts` gets the sum of what decays get, for which q (k) are in
    `vector`; a reader's is `step` tokens ahead. The readers find out what passes `through` to the `others` too, where
    both are there (`meets`). GATED, SCALED: any direction is, which this one need not be (`gated`, `scaled`).

    Pointers stand at the tile's first token, the slot, and their first heads.
    """
    i = tl.arange(0, C.TILE)
    valid = i < left
    grad = tl.zeros((C.TILE, C.BLOCK_N), tl.float32)
    elements: tl.constexpr = C.D_STATE * C.HEADDIM
    shared: tl.constexpr = C.BLOCK_N * C.TILE // C.CHUNK
    end = tl.where(reverse, 0, C.CHUNK - 1)
    for number in tl.range(C.HEADS, num_stages=1):
        head = (h0 + number).to(tl.int64)
        of_head = head * directions
        at_sums = sums + of_head * (C.FACTORS * C.CHUNK) if C.FACTORS else sums
        of_state = states + of_head * elements
        part = tl.zeros((C.TILE, C.BLOCK_N), tl.float32)
        for p0 in tl.static_range(0, C.HEADDIM, C.BLOCK_P):
            at, inside = layout.state_places(n0, p0, C.BLOCK_N, C)
            h = tl.load(of_state + at, mask=inside & there, other=0.0)
            row = layout.load_rows(rows + head * rows_h, rows_l, i, valid, p0, C.HEADDIM, C.BLOCK_P)
            part = layout.state_dot(row, tl.trans(h), part, C.PRECISION)
        if C.NORMALIZE:
            # The sum over a row is the product with one more channel of v that holds ones.
            h_sum = load_vector(vectors + of_head * C.D_STATE, there, n0, C)
            ones = tl.where(valid, 1.0, 0.0) if WRITES else layout.load_factor(u + head * u_h, u_l, i, valid)
            part += ones[:, None] * h_sum[None, :]
        factor = tl.where(valid, 1.0, 0.0)
        if GATED:
            end_high, end_low = layout.edge_sum(at_sums, end, C)
            high, low = layout.edge_sum(at_sums, i + (r0 + step), C)
            if WRITES:
                exponent = layout.exponents(end_high, end_low, high, low, C.EXACT)
            else:
                exponent = high + low if C.EXACT else high
            factor = tl.exp2(exponent) if GATED == 2 else tl.where(gated, tl.exp2(exponent), factor)
        if GATED or (WRITES and SCALED):
            tl.store(decay_parts + head * tokens + i, tl.sum(part * vector, 1) * factor, mask=valid)
        if GATED and not WRITES:
            passed = 0.0
            # The chunk's last tile with tokens takes the shares of those behind it.
            for share in tl.range(
                r0 // C.TILE, tl.where(left > C.TILE, r0 // C.TILE + 1, C.CHUNK // C.TILE), num_stages=1
            ):
                passed += passed_through(of_state, others + of_head * elements, meets, n0 + share * shared, shared, C)
            if C.NORMALIZE:
                g_sum = load_vector(other_vectors + of_head * C.D_STATE, meets, n0, C)
                passed += tl.where(r0 == 0, tl.sum(h_sum * g_sum, 0), 0.0)
            tl.store(through + head, passed * tl.exp2(end_high + end_low if C.EXACT else end_high))
        if WRITES and SCALED:
            scale = layout.load_factor(w + head * w_h, w_l, i, valid if SCALED == 2 else valid & scaled)
            factor *= scale if SCALED == 2 else tl.where(scaled, scale, 1.0)
        grad += part * factor[:, None]
    return grad


@triton.jit(do_not_specialize=["seqlen", "per_row", "tokens", "f_s", "tile_stride"])
def vector_gradients(
    dq1, dk1, dq2, dk2, d_s, d_b, d_l: tl.constexpr, d_g, dscores, own_scores, read1, wrote1, through1, read2, wrote2,
    through2, f_s, tile_stride, dy1, dy2, dy_b, dy_l: tl.constexpr, dy_h, v, v_b, v_l: tl.constexpr, v_h, q1, q1_b,
    q1_l: tl.constexpr, q1_g, k1, k1_b, k1_l: tl.constexpr, k1_g, q2, q2_b, q2_l: tl.constexpr, q2_g, k2, k2_b,
    k2_l: tl.constexpr, k2_g, u, u_b, u_l: tl.constexpr, u_h, w1, w1_b, w1_l: tl.constexpr, w1_h, w2, w2_b,
    w2_l: tl.constexpr, w2_h, sums, entering, entering_vectors, leaving, leaving_vectors, table, seqlen, per_row,
    tokens, heads, share, C: tl.constexpr,
):  # fmt: skip
    """The gradients of BLOCK_N elements of q and k, from those of the scores and (where states are STORED) through the
    states at the chunk's edges. `read`, `wrote` and, for each tile of a chunk, `through` get a part for each such
    block. ENTERS, LEAVES: documents begin with states, or end with cotangents of states, that are not zero."""
    tiles: tl.constexpr = C.CHUNK // C.TILE
    directions: tl.constexpr = 2 if C.TWO else 1
    parts = heads // C.HEADS
    h0 = tl.program_id(0) % parts * C.HEADS
    unit = tl.program_id(0) // parts
    slot = unit // tiles
    r0 = unit % tiles * C.TILE
    n0 = tl.program_id(1) * C.BLOCK_N
    writes = tl.program_id(2) % 2 == 1
    second = tl.program_id(2) >= 2
    group = (h0 // share).to(tl.int64)
    part = (h0 % share // C.HEADS).to(tl.int64)
    chunk, batch_row, begin, length = located(slot, table, seqlen, per_row, C.PACKED)
    place = chunk * C.CHUNK + r0
    left = length - place
    if left <= 0:
        return
    if C.WHOLE:
        tl.assume(left >= C.CHUNK - r0)
    b = batch_row.to(tl.int64)
    t = (begin + place).to(tl.int64)
    at_out = part * d_s + b * d_b + t * d_l + group * d_g
    of_slot = slot.to(tl.int64) * heads * directions + tl.where(second, 1, 0)
    of_block = tl.program_id(1).to(tl.int64)
    at_f = of_block * f_s + b * seqlen + t
    at_tile = of_block * tile_stride + unit.to(tl.int64) * heads
    elements: tl.constexpr = C.D_STATE * C.HEADDIM
    # 2: every direction is.
    GATED: tl.constexpr = 2 if C.GATED1 and (C.GATED2 or not C.TWO) else 1 if C.GATED1 or C.GATED2 else 0
    SCALED: tl.constexpr = 2 if C.SCALED1 and (C.SCALED2 or not C.TWO) else 1 if C.SCALED1 or C.SCALED2 else 0
    reverse = second | C.REVERSE
    starts, ends = chunk > 0, (chunk + 1) * C.CHUNK < length
    enters = C.ENTERS | tl.where(reverse, ends, starts)
    leaves = C.LEAVES | tl.where(reverse, starts, ends)
    gated = one_side(C.GATED1, C.GATED2, second, C.TWO)
    scaled = one_side(C.SCALED1, C.SCALED2, second, C.TWO)
    at_v = v + b * v_b + t * v_l
    at_y = one_side(dy1, dy2, second, C.TWO) + b * dy_b + t * dy_l
    at_u = u + b * u_b + t * u_l if C.NORMALIZE else u
    w_b, w_l = one_side(w1_b, w2_b, second, C.TWO), one_side(w1_l, w2_l, second, C.TWO)
    w_h = one_side(w1_h, w2_h, second, C.TWO)
    at_w = w1
    if C.SCALED1 and C.SCALED2:
        at_w = one_side(w1, w2, second, C.TWO) + b * w_b + t * w_l
    elif C.SCALED2:
        at_w = w2 + b * w2_b + t * w2_l
    elif C.SCALED1:
        at_w += b * w1_b + t * w1_l
    of_sums = sums + of_slot * (C.FACTORS * C.CHUNK) if C.FACTORS else sums
    entry = entering + of_slot * elements if C.STORED else entering
    entry_vectors = entering_vectors + of_slot * C.D_STATE if C.STORED and C.NORMALIZE else entering_vectors
    exit_at = leaving + of_slot * elements if C.STORED else leaving
    exit_vectors = leaving_vectors + of_slot * C.D_STATE if C.STORED and C.NORMALIZE else leaving_vectors
    i = tl.arange(0, C.TILE)
    n = n0 + tl.arange(0, C.BLOCK_N)
    valid = i < left
    # A reader's gradient belongs to the token whose q it read with.
    step = tl.where(reverse, 1, -1) if C.SHIFT else 0
    source = i + step
    there = (source >= -place) & (source < left)
    q_b, k_b = one_side(q1_b, q2_b, second, C.TWO), one_side(k1_b, k2_b, second, C.TWO)
    q_l, k_l = one_side(q1_l, q2_l, second, C.TWO), one_side(k1_l, k2_l, second, C.TWO)
    q_g, k_g = one_side(q1_g, q2_g, second, C.TWO), one_side(k1_g, k2_g, second, C.TWO)
    q, of_q = one_side(q1, q2, second, C.TWO), b * q_b + t * q_l + group * q_g
    k, of_k = one_side(k1, k2, second, C.TWO), b * k_b + t * k_l + group * k_g
    grad = tl.zeros((C.TILE, C.BLOCK_N), tl.float32)
    if C.STORED:
        if writes:
            grad = side_gradients(
                layout.load_rows(k + of_k, k_l, i, valid, n0, C.D_STATE, C.BLOCK_N).to(tl.float32),
                one_side(wrote1, wrote2, second, C.TWO) + at_f if GATED or SCALED else wrote1, through1, at_v, v_l, v_h,
                at_u, u_l, u_h, at_w, w_l, w_h, of_sums, exit_at, exit_vectors, entry, entry_vectors, h0, r0, left,
                tokens, 0, reverse, gated, scaled, leaves, enters & leaves, n0, directions, True, GATED, SCALED, C,
            )  # fmt: skip
        else:
            grad = side_gradients(
                layout.load_rows(q + of_q, q_l, source, there & valid, n0, C.D_STATE, C.BLOCK_N).to(tl.float32),
                one_side(read1, read2, second, C.TWO) + at_f if GATED else read1,
                one_side(through1, through2, second, C.TWO) + at_tile if GATED else through1, at_y, dy_l, dy_h, at_u,
                u_l, u_h, at_w, w_l, w_h, of_sums, entry, entry_vectors, exit_at, exit_vectors, h0, r0, left, tokens,
                step, reverse, gated, scaled, enters, enters & leaves, n0, directions, False, GATED, SCALED, C,
            )  # fmt: skip
    # Writers meet the q that tokens read with, and readers the k of writers. AMD's compiler fails where pointers are
    # chosen that have got offsets.
    partner, partner_l = tl.where(writes, q, k) + tl.where(writes, of_q, of_k), tl.where(writes, q_l, k_l)
    partner_step = tl.where(writes, step, 0)
    matrix: tl.constexpr = C.TILE * C.TILE
    program = tl.program_id(0).to(tl.int64)
    # Writers are rows of the first one of a program's two matrices, and columns of the other one.
    at_scores = dscores + program * (tiles * matrix) + i[:, None] * C.TILE + i[None, :]
    scores = tl.load(at_scores)
    along = tl.where(reverse, -i, i)
    scores = tl.where(along[:, None] < along[None, :], scores, 0.0)
    at = i + partner_step
    met = (at >= -place) & (at < left) & valid
    x = layout.load_rows(partner, partner_l, at, met, n0, C.D_STATE, C.BLOCK_N)
    if writes == 0:
        scores = tl.trans(scores)
    grad = add_product(grad, scores, x, C.PRECISION)
    if not C.SHIFT:
        of_direction = program * directions + tl.where(second, 1, 0)
        grad += tl.load(own_scores + of_direction * C.TILE + i)[:, None] * x.to(tl.float32)
    if tiles > 1:
        # The first tile writes to the other one in the direction that runs forward, the second one in the other.
        ahead = tl.where(r0 == 0, C.TILE, -C.TILE)
        meets = (writes == ((r0 == 0) != reverse)) & (left > ahead)
        other = tl.where(writes, 0, tl.where(r0 == 0, parts, -parts) * (tiles * matrix))
        across = tl.load(at_scores + (other + matrix), mask=meets, other=0.0)
        at += ahead
        met = (at >= -place) & (at < left) & (i < left - ahead)
        x = layout.load_rows(partner, partner_l, at, met & meets, n0, C.D_STATE, C.BLOCK_N)
        if writes:
            across = tl.trans(across)
        grad = add_product(grad, across, x, C.PRECISION)
    at = tl.where(writes, i, source)
    inside = ((at >= -place) & (at < left))[:, None]
    if C.D_STATE % C.BLOCK_N != 0:
        inside = inside & (n[None, :] < C.D_STATE)
    out = tl.where(writes, one_side(dk1, dk2, second, C.TWO), one_side(dq1, dq2, second, C.TWO)) + at_out
    tl.store(out + at[:, None] * d_l + n[None, :], grad.to(out.dtype.element_ty), mask=inside)
