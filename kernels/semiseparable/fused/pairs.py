"""Gradients inside chunks, for all directions at once: of v (whole), of the diagonal, of the scores q k^T, and what
pairs of tokens of one chunk give to those of log-decays and input scales.

One program takes one tile and some heads of a group, over which the gradient of the scores is added up: vectors.py
multiplies it with q and k. What goes through states to other chunks is vectors.py's; for v it is added here. Matrices
have writers in their rows and readers in their columns, so that the product with dy needs no transposition.
"""

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused import layout
from matmix.kernels.slots import located

LEAST_SCALE = tl.constexpr(2.0**-64)
"""Taken for input scales that are nearer to 0, inside of tiles: far below what rounding makes of any other pair."""


@triton.jit
def pair_decays(sums1, sums2, i, r0, first, C: tl.constexpr):
    """The decay between a writer (row) and a reader (column) in the direction in which they meet; 0 where they do not.
    On the diagonal it is anything."""
    exponent = layout.tile_exponents(sums1, i, r0, True, C.REVERSE, C.GATED1, C)
    if C.TWO:
        exponent = tl.where(first, exponent, layout.tile_exponents(sums2, i, r0, True, True, C.GATED2, C))
    else:
        exponent = tl.where(first, exponent, float("-inf"))
    return tl.exp2(exponent)


@triton.jit
def sums_between(changes, writes, i, REVERSE: tl.constexpr, C: tl.constexpr):
    """(TILE,) for each token the sum of `changes` over the pairs between which its decay stands. `writes` (TILE, TILE):
    1 where the writer (column) comes before the token (row), else 0.

    Every such pair is added once and no other one: differences of sums over all pairs would lose what strong decays
    leave.
    """
    if writes.dtype == tl.float32:
        passed = tl.dot(writes, changes, input_precision=C.PRECISION)
    else:
        # Two numbers of half precision are nearly as good as one of single precision.
        high = (changes.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        passed = tl.dot(writes, (changes - high).to(writes.dtype))
        passed = tl.dot(writes, high.to(writes.dtype), acc=passed)
    if REVERSE:
        after = i[None, :] < i[:, None] if C.SHIFT else i[None, :] <= i[:, None]
    else:
        after = i[None, :] > i[:, None] if C.SHIFT else i[None, :] >= i[:, None]
    return tl.sum(tl.where(after, passed, 0.0), 1)


@triton.jit
def write_state(
    whole, k, k_l, sums, leaving, scale, there, r0, left, p0, REVERSE: tl.constexpr, GATED: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Returns the gradient that a tile's values (TILE, BLOCK_P) get through the state that leaves the chunk."""
    i = tl.arange(0, C.TILE)
    valid = i < left
    wrote = tl.zeros((C.TILE, C.BLOCK_P), tl.float32)
    for n0 in tl.static_range(0, C.D_STATE, C.BLOCK_N):
        c = whole if C.D_STATE <= C.BLOCK_N else layout.load_rows(k, k_l, i, valid, n0, C.D_STATE, C.BLOCK_N)
        at, inside = layout.state_places(n0, p0, C.BLOCK_N, C)
        wrote = layout.state_dot(c, tl.load(leaving + at, mask=inside & there, other=0.0), wrote, C.PRECISION)
    factor = scale
    if GATED:
        edge_high, edge_low = layout.edge_sum(sums, 0 if REVERSE else C.CHUNK - 1, C)
        high, low = layout.write_sums(sums + r0, i, C)
        factor *= tl.exp2(layout.exponents(edge_high, edge_low, high, low, C.EXACT))
    return wrote * factor[:, None]


@triton.jit(do_not_specialize=["seqlen", "per_row", "tokens", "self_weight"])
def pair_gradients(
    dv, dv_b, dv_l: tl.constexpr, dv_h, dscores, own_scores, decays1, scales1, decays2, scales2, crossed, entered, dd1,
    dd2, dy1, dy2, dy_b, dy_l: tl.constexpr, dy_h, v, v_b, v_l: tl.constexpr, v_h, q1, q1_b, q1_l: tl.constexpr, q1_g,
    k1, k1_b, k1_l: tl.constexpr, k1_g, q2, q2_b, q2_l: tl.constexpr, q2_g, k2, k2_b, k2_l: tl.constexpr, k2_g, given,
    given_b, given_l: tl.constexpr, given_h, u, u_b, u_l: tl.constexpr, u_h, w1, w1_b, w1_l: tl.constexpr, w1_h, w2,
    w2_b, w2_l: tl.constexpr, w2_h, sums, triangle, leaving, table, seqlen, per_row, tokens, heads, share, self_weight,
    C: tl.constexpr,
):  # fmt: skip
    """Computes the gradients inside a chunk of one or two tiles. HALVES: each direction has a cotangent of its own.

    `dscores`, two (TILE, TILE) matrices for each program where a chunk has two tiles, gets the gradient of the scores
    of the tile's writers (rows) and readers (columns), and then that of readers of the other tile (rows) and these
    writers (columns). `own_scores` (programs, directions, TILE) float32 gets that of tokens' scores with themselves.
    `decays` and `scales` get what the tile's own pairs give to the log-decays, and all pairs of the chunk to the input
    scales. `crossed` and `entered` get, for each token, the sum of the gradients of the exponents of all pairs in which
    it writes to the other tile, or reads from it: each of the two tiles writes in one direction and reads in the other.
    """
    tiles: tl.constexpr = C.CHUNK // C.TILE
    CROSS: tl.constexpr = tiles == 2
    # AMD's compiler fails where products of single precision stand in a branch.
    ALWAYS: tl.constexpr = C.TWO or C.EXACT
    SCALED: tl.constexpr = C.SCALED1 or C.SCALED2
    directions: tl.constexpr = 2 if C.TWO else 1
    parts = heads // C.HEADS
    h0 = tl.program_id(0) % parts * C.HEADS
    unit = tl.program_id(0) // parts
    slot = unit // tiles
    r0 = unit % tiles * C.TILE
    group = (h0 // share).to(tl.int64)
    chunk, batch_row, begin, length = located(slot, table, seqlen, per_row, C.PACKED)
    place = chunk * C.CHUNK + r0
    left = length - place
    if left <= 0:
        return
    if C.WHOLE:
        tl.assume(left >= C.CHUNK - r0)
    b = batch_row.to(tl.int64)
    t = (begin + place).to(tl.int64)
    i = tl.arange(0, C.TILE)
    valid = i < left
    on = i[:, None] == i[None, :]
    # Which of the strict triangles belongs to the first direction; writers are rows.
    first = i[:, None] > i[None, :] if C.REVERSE else i[:, None] < i[None, :]
    second = ~(first | on)
    elements: tl.constexpr = C.D_STATE * C.HEADDIM
    starts, ends = chunk > 0, (chunk + 1) * C.CHUNK < length

    of_q1 = b * q1_b + t * q1_l + group * q1_g
    of_k1 = b * k1_b + t * k1_l + group * k1_g
    at_q1 = q1 + of_q1
    at_k1 = k1 + of_k1
    at_q2 = at_q1
    at_k2 = at_k1
    source1, readable1 = layout.shifted(i, place, left, C.REVERSE, C.SHIFT)
    source2, readable2 = layout.shifted(i, place, left, True, C.SHIFT)
    whole1 = layout.load_rows(at_k1, k1_l, i, valid, 0, C.D_STATE, C.BLOCK_N)
    whole2 = whole1
    if C.TWO:
        of_q2 = b * q2_b + t * q2_l + group * q2_g
        of_k2 = b * k2_b + t * k2_l + group * k2_g
        at_q2 = q2 + of_q2
        at_k2 = k2 + of_k2
        whole2 = layout.load_rows(at_k2, k2_l, i, valid, 0, C.D_STATE, C.BLOCK_N)
    met1 = tl.zeros((C.TILE,), tl.float32)
    met2 = tl.zeros((C.TILE,), tl.float32)
    own1 = tl.zeros((C.TILE,), tl.float32)
    own2 = tl.zeros((C.TILE,), tl.float32)
    scores = layout.side_scores(whole1, at_k1, k1_l, at_q1, q1_l, i, valid, source1, readable1, C)
    if not C.SHIFT:
        own1 += tl.sum(tl.where(on, scores, 0.0), 1)
    if C.TWO:
        scores2 = layout.side_scores(whole2, at_k2, k2_l, at_q2, q2_l, i, valid, source2, readable2, C)
        if not C.SHIFT:
            own2 += tl.sum(tl.where(on, scores2, 0.0), 1)
        scores = tl.where(first, scores, scores2)
    # On the diagonal `decays` have what stands there in the mixer matrix.
    scores = tl.where(on, 1.0, scores if C.TWO else tl.where(first, scores, 0.0))
    total = tl.zeros((C.TILE, C.TILE), tl.float32)

    # The other tile of the chunk, `ahead` of this one: tokens of the first tile write to it in the direction that runs
    # forward, those of the second one in the other direction.
    forward = r0 == 0
    meets = forward != C.REVERSE
    ahead = tl.where(forward, C.TILE, -C.TILE)
    dcross = total
    if CROSS:
        # AMD's compiler fails where pointers are chosen that have got offsets.
        at_qx = tl.where(forward, q1, q2) + tl.where(forward, of_q1, of_q2) if C.TWO else at_q1
        at_kx = tl.where(forward, k1, k2) + tl.where(forward, of_k1, of_k2) if C.TWO else at_k1
        qx_l = tl.where(forward, q1_l, q2_l) if C.TWO else q1_l
        kx_l = tl.where(forward, k1_l, k2_l) if C.TWO else k1_l
        scores_x, turned_x = layout.cross_scores(at_qx, qx_l, at_kx, kx_l, place, left, ahead, forward, C)

    if C.GATED1 or C.GATED2:
        below = tl.load(triangle + i[:, None] * C.TILE + i[None, :])
    for step in tl.range(C.HEADS, num_stages=1):
        head = (h0 + step).to(tl.int64)
        at_h = (b * seqlen + t) * heads + head
        at_f = head * tokens + b * seqlen + t
        at_y = b * dy_b + t * dy_l + head * dy_h
        at_v = v + b * v_b + t * v_l + head * v_h
        at_w1 = w1 + b * w1_b + t * w1_l + head * w1_h if C.SCALED1 else w1
        at_w2 = w2 + b * w2_b + t * w2_l + head * w2_h if C.SCALED2 else w2
        of_slot = (slot.to(tl.int64) * heads + head) * directions
        sums1 = sums + of_slot * (C.FACTORS * C.CHUNK) if C.FACTORS else sums
        sums2 = sums + (of_slot + 1) * (C.FACTORS * C.CHUNK) if C.FACTORS else sums
        sums_x = sums1
        if C.TWO and C.FACTORS:
            sums_x = sums + (of_slot + tl.where(forward, 0, 1)) * (C.FACTORS * C.CHUNK)

        pairs = tl.zeros((C.TILE, C.TILE), tl.float32)
        if C.HALVES:
            pairs2 = tl.zeros((C.TILE, C.TILE), tl.float32)
        for p0 in tl.static_range(0, C.HEADDIM, C.BLOCK_P):
            value = layout.load_rows(at_v, v_l, i, valid, p0, C.HEADDIM, C.BLOCK_P)
            grad = layout.load_rows(dy1 + at_y, dy_l, i, valid, p0, C.HEADDIM, C.BLOCK_P)
            pairs = tl.dot(value, tl.trans(grad), acc=pairs, input_precision=C.PRECISION)
            if C.HALVES:
                grad = layout.load_rows(dy2 + at_y, dy_l, i, valid, p0, C.HEADDIM, C.BLOCK_P)
                pairs2 = tl.dot(value, tl.trans(grad), acc=pairs2, input_precision=C.PRECISION)
        if C.NORMALIZE:
            # The sum over a row is the product with one more channel of v that holds ones.
            factor = layout.load_factor(u + b * u_b + t * u_l + head * u_h, u_l, i, valid)
            pairs += tl.where(valid[:, None], factor[None, :], 0.0)
        along1 = tl.zeros((C.TILE,), tl.float32)
        along2 = along1
        if C.DIAGONAL or not C.SHIFT:
            along1 += tl.sum(tl.where(on, pairs, 0.0), 1)
            along2 = along1
            if C.HALVES:
                along2 = tl.sum(tl.where(on, pairs2, 0.0), 1)
        if C.HALVES:
            pairs = tl.where(first, pairs, pairs2)
        if C.DIAGONAL:
            tl.store(dd1 + at_h + i * heads, along1, mask=valid)
            if C.HALVES:
                tl.store(dd2 + at_h + i * heads, along2, mask=valid)

        decays = pair_decays(sums1, sums2, i, r0, first, C)
        scale1 = tl.where(valid, 1.0, 0.0)
        scale2 = scale1
        if C.SCALED1:
            scale1 = layout.load_factor(at_w1, w1_l, i, valid)
        if C.SCALED2:
            scale2 = layout.load_factor(at_w2, w2_l, i, valid)
        if SCALED:
            # What a scale gets is divided by it below: one of 0 would lose its gradient.
            scale1 = tl.where(tl.abs(scale1) < LEAST_SCALE, LEAST_SCALE, scale1)
            scale2 = tl.where(tl.abs(scale2) < LEAST_SCALE, LEAST_SCALE, scale2)
            decays *= tl.where(first, scale1[:, None], scale2[:, None]) if C.TWO else scale1[:, None]
        # Each direction's own terms (without shift) lie on the diagonal, and have no decay.
        own = own1 * self_weight
        also = own2 * self_weight
        dscale1 = along1 * own
        dscale2 = along2 * also
        own *= scale1
        also *= scale2
        diagonal = tl.zeros((C.TILE,), tl.float32)
        if C.DIAGONAL:
            diagonal += layout.load_factor(given + b * given_b + t * given_l + head * given_h, given_l, i, valid)
        decays = tl.where(on, (own + also + diagonal)[:, None], decays)
        matrix = scores * decays
        changes = pairs * matrix
        total += pairs * decays
        if SCALED:
            dscale1 += tl.sum(tl.where(first, changes, 0.0), 1) / scale1
            if C.TWO:
                dscale2 += tl.sum(tl.where(second, changes, 0.0), 1) / scale2
        met1 += along1 * scale1 * self_weight
        if C.TWO:
            met2 += along2 * scale2 * self_weight
        if C.GATED1:
            between = sums_between(changes, tl.trans(below) if C.REVERSE else below, i, C.REVERSE, C)
            tl.store(decays1 + at_f + i, between, mask=valid)
        if C.GATED2:
            between = sums_between(changes, tl.trans(below), i, True, C)
            tl.store(decays2 + at_f + i, between, mask=valid)

        if C.HALVES:
            half = tl.where(on, (also + diagonal)[:, None], tl.where(second, matrix, 0.0))
            matrix = tl.where(on, (own + diagonal)[:, None], tl.where(first, matrix, 0.0))

        written = tl.zeros((C.TILE,), tl.float32)
        if CROSS:
            scale_x = tl.where(forward, scale1, scale2) if C.TWO else scale1
            decay_x, reads_x = layout.cross_decays(sums_x, r0, ahead, forward, C)
            reads_there = i < left - ahead
            if C.EXACT and not C.TWO:
                decay_x = tl.where(meets, decay_x, 0.0)
                reads_x = tl.where(meets, reads_x, 0.0)
                reads_there = reads_there & meets
            writes_x = decay_x * scale_x
            at_dyx = (tl.where(forward, dy1, dy2) if C.HALVES else dy1) + at_y + ahead * dy_l
            pairs_x = tl.zeros((C.TILE, C.TILE), tl.float32)
        for p0 in tl.static_range(0, C.HEADDIM, C.BLOCK_P):
            if C.HEADDIM > C.BLOCK_P:
                value = layout.load_rows(at_v, v_l, i, valid, p0, C.HEADDIM, C.BLOCK_P)
            if C.HALVES or C.HEADDIM > C.BLOCK_P:
                grad = layout.load_rows(dy1 + at_y, dy_l, i, valid, p0, C.HEADDIM, C.BLOCK_P)
            out = tl.dot(matrix.to(grad.dtype), grad, input_precision=C.PRECISION)
            if C.HALVES:
                grad = layout.load_rows(dy2 + at_y, dy_l, i, valid, p0, C.HEADDIM, C.BLOCK_P)
                out = tl.dot(half.to(grad.dtype), grad, acc=out, input_precision=C.PRECISION)
            if C.STORED:
                out += write_state(
                    whole1, at_k1, k1_l, sums1, leaving + of_slot * elements, scale1,
                    C.INITIAL | (starts if C.REVERSE else ends), r0, left, p0, C.REVERSE, C.GATED1, C,
                )  # fmt: skip
                if C.TWO:
                    out += write_state(
                        whole2, at_k2, k2_l, sums2, leaving + (of_slot + 1) * elements, scale2, C.INITIAL | starts, r0,
                        left, p0, True, C.GATED2, C,
                    )  # fmt: skip
            if CROSS:
                if ALWAYS or meets:
                    grad_x = layout.load_rows(at_dyx, dy_l, i, reads_there, p0, C.HEADDIM, C.BLOCK_P)
                    out, pairs_x, written = layout.cross_values(
                        out, pairs_x, written, scores_x, value, grad_x, writes_x, reads_x, C.PRECISION
                    )
            p = p0 + tl.arange(0, C.BLOCK_P)
            target = dv + b * dv_b + t * dv_l + head * dv_h + i[:, None] * dv_l + p[None, :]
            inside = valid[:, None]
            if C.HEADDIM % C.BLOCK_P != 0:
                inside = inside & (p[None, :] < C.HEADDIM)
            tl.store(target, out.to(dv.dtype.element_ty), mask=inside)
        if CROSS:
            if ALWAYS or meets:
                if C.NORMALIZE:
                    at_u = u + b * u_b + (t + ahead) * u_l + head * u_h
                    reading = layout.load_factor(at_u, u_l, i, reads_there) * reads_x
                    pairs_x += tl.where(valid[None, :], reading[:, None], 0.0)
                    written += tl.sum(scores_x.to(tl.float32) * reading[None, :], 1)
                pairs_x *= layout.settled(writes_x)[None, :]
                dcross += pairs_x
                written *= decay_x
                if C.GATED1 or C.GATED2:
                    tl.store(crossed + at_f + i, written * scale_x, mask=valid)
                    read = tl.sum(pairs_x * turned_x, 1)
                    tl.store(entered + at_f + ahead + i, read, mask=reads_there)
        if C.SCALED1:
            tl.store(scales1 + at_f + i, dscale1 + (tl.where(forward, written, 0.0) if C.TWO else written), mask=valid)
        if C.SCALED2:
            tl.store(scales2 + at_f + i, dscale2 + tl.where(forward, 0.0, written), mask=valid)

    at = dscores + tl.program_id(0).to(tl.int64) * (tiles * C.TILE * C.TILE) + i[:, None] * C.TILE + i[None, :]
    tl.store(at, total.to(dscores.dtype.element_ty))
    if CROSS:
        if ALWAYS or meets:
            tl.store(at + C.TILE * C.TILE, dcross.to(dscores.dtype.element_ty))
    if not C.SHIFT:
        at = own_scores + tl.program_id(0).to(tl.int64) * (directions * C.TILE) + i
        tl.store(at, met1)
        if C.TWO:
            tl.store(at + C.TILE, met2)
