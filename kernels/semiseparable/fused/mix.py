"""The product with the mixer matrix, y = M v.

The rows of one tile, for one head: scores q k^T below and above the diagonal from the two directions, times decays and
input scales, with the whole diagonal added, multiplied with the tile's values; and what those rows read from the states
that enter the tile from either side. Nothing is flipped, and y is written once.

A program makes one tile for some heads of a group, which share the scores. Where there are documents and heads enough
for all of a GPU, one makes all tiles of one document for one head instead: it carries the first direction's state along
in registers, which then is neither written to memory nor read from there.

Heads vary fastest over programs: those of a group read the same q and k at the same time.
"""

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused import layout
from matmix.kernels.slots import bounds, first_slot, located


@triton.jit
def read_state(
    whole, q, q_l, k, k_l, v, v_l, w, w_l, sums, state, vector, there, r0, place, left, p0, REVERSE: tl.constexpr,
    GATED: tl.constexpr, SCALED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Returns what a tile's rows (TILE, BLOCK_P) read through the tile's entering edge, from the state at the chunk's
    edge and from the chunk's tiles between; and the same for sums of rows, (TILE,)."""
    i = tl.arange(0, C.TILE)
    source, readable = layout.shifted(i, place, left, REVERSE, C.SHIFT)
    read = tl.zeros((C.TILE, C.BLOCK_P), tl.float32)
    sums_read = tl.zeros((C.TILE,), tl.float32)
    if C.STORED:
        for n0 in tl.static_range(0, C.D_STATE, C.BLOCK_N):
            x = (
                whole
                if C.D_STATE <= C.BLOCK_N
                else layout.load_rows(q, q_l, source, readable, n0, C.D_STATE, C.BLOCK_N)
            )
            at, inside = layout.state_places(n0, p0, C.BLOCK_N, C)
            read = layout.state_dot(x, tl.load(state + at, mask=inside & there, other=0.0), read, C.PRECISION)
            if C.NORMALIZE:
                n = n0 + tl.arange(0, C.BLOCK_N)
                z = tl.load(vector + n, mask=(n < C.D_STATE) & there, other=0.0)
                sums_read += tl.sum(x.to(tl.float32) * z[None, :], 1)
    # The sum up to the edge that `read` stands at: the chunk's, then those of its tiles up to this one.
    edge_high = left * 0.0
    edge_low = edge_high
    if C.CHUNK > C.TILE:
        here = r0 // C.TILE
        last = tl.minimum(here + tl.cdiv(left, C.TILE), C.CHUNK // C.TILE)
        for step in tl.range(last - 1 - here if REVERSE else here, num_stages=1):
            tile = last - 1 - step if REVERSE else step
            ahead = tile * C.TILE - r0
            if C.WHOLE:
                tl.assume(left - ahead >= C.TILE)
            there_j = i < left - ahead
            scores = layout.side_scores(whole, q, q_l, k + ahead * k_l, k_l, source, readable, i, there_j, C)
            weight = i * 0.0 + 1.0
            if GATED:
                high, low = layout.edge_sum(sums, layout.leaving_edge(tile * C.TILE, REVERSE, C.TILE), C)
                through = tl.exp2(layout.exponents(high, low, edge_high, edge_low, C.EXACT))
                read *= through
                sums_read *= through
                edge_high = high
                edge_low = low
                high, low = layout.write_sums(sums + (r0 + ahead), i, C)
                weight = tl.exp2(layout.exponents(edge_high, edge_low, high, low, C.EXACT))
            if SCALED:
                weight *= layout.settled(layout.load_factor(w + ahead * w_l, w_l, i, there_j))
            if GATED or SCALED:
                scores *= weight[None, :]
            values = layout.load_rows(v + ahead * v_l, v_l, i, there_j, p0, C.HEADDIM, C.BLOCK_P)
            read = tl.dot(scores.to(values.dtype), values, acc=read, input_precision=C.PRECISION)
            if C.NORMALIZE:
                sums_read += tl.sum(scores, 1)
    return decayed(read, sums_read, sums, i, r0, edge_high, edge_low, REVERSE, GATED, C)


@triton.jit
def decayed(
    read, sums_read, sums, i, r0, edge_high, edge_low, REVERSE: tl.constexpr, GATED: tl.constexpr, C: tl.constexpr
):
    """Returns what rows read at an edge (`edge_high` sums up to it), with the decays between the edge and the rows."""
    if GATED:
        high, low = layout.read_sums(sums + r0, i, r0, REVERSE, C)
        factor = tl.exp2(layout.exponents(high, low, edge_high, edge_low, C.EXACT))
        read *= factor[:, None]
        sums_read *= factor
    return read, sums_read


@triton.jit
def read_carried(x, h, z, sums, place, left, r0, REVERSE: tl.constexpr, GATED: tl.constexpr, C: tl.constexpr):
    """Returns what a tile's rows x (q) read from the state h (BLOCK_N, BLOCK_P) at the tile's entering edge, (TILE,
    BLOCK_P); and the same for sums of rows z, (TILE,)."""
    i = tl.arange(0, C.TILE)
    read = layout.state_dot(x, h, tl.zeros((C.TILE, h.shape[1]), tl.float32), C.PRECISION)
    sums_read = tl.zeros((C.TILE,), tl.float32)
    if C.NORMALIZE:
        sums_read += tl.sum(x.to(tl.float32) * z[None, :], 1)
    edge_high = place * 0.0
    edge_low = edge_high
    if GATED:
        edge_high, edge_low = layout.edge_sum(sums, layout.entering_edge(r0, REVERSE, C.TILE), C)
    return decayed(read, sums_read, sums, i, r0, edge_high, edge_low, REVERSE, GATED, C)


@triton.jit
def tile_scores(whole1, q1, q1_l, k1, k1_l, whole2, q2, q2_l, k2, k2_l, place, left, C: tl.constexpr):
    """(TILE, TILE) scores of readers (rows) and writers of a tile, each triangle from the direction that it belongs to,
    and (TILE,) those of tokens with themselves, by direction (zero with SHIFT)."""
    i = tl.arange(0, C.TILE)
    valid = i < left
    on = i[:, None] == i[None, :]
    source, readable = layout.shifted(i, place, left, C.REVERSE, C.SHIFT)
    scores = layout.side_scores(whole1, q1, q1_l, k1, k1_l, source, readable, i, valid, C)
    own1 = tl.zeros((C.TILE,), tl.float32)
    own2 = tl.zeros((C.TILE,), tl.float32)
    if not C.SHIFT:
        own1 += tl.sum(tl.where(on, scores, 0.0), 1)
    if C.TWO:
        source, readable = layout.shifted(i, place, left, True, C.SHIFT)
        scores2 = layout.side_scores(whole2, q2, q2_l, k2, k2_l, source, readable, i, valid, C)
        if not C.SHIFT:
            own2 += tl.sum(tl.where(on, scores2, 0.0), 1)
        scores = tl.where(i[:, None] < i[None, :] if C.REVERSE else i[:, None] > i[None, :], scores, scores2)
    return scores, own1, own2


@triton.jit
def mix_tile(
    y, y_b, y_l, y_h, row_sums, rest, v, v_b, v_l, v_h, at_q1, q1_l, at_k1, k1_l, at_q2, q2_l, at_k2, k2_l, d, d_b, d_l,
    d_h, w1, w1_b, w1_l, w1_h, w2, w2_b, w2_l, w2_h, sums, states, vectors, whole1, whole2, scores, own1, own2, h, z, b,
    t, head, slot, r0, place, left, starts, ends, p0, seqlen, heads, self_weight, eps, SHARED: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """One tile, one head and BLOCK_P channels. SHARED: the scores are given. With WALK the first direction reads from
    h and z; returned are these behind the tile."""
    tiles: tl.constexpr = C.CHUNK // C.TILE
    directions: tl.constexpr = 2 if C.TWO else 1
    elements: tl.constexpr = C.D_STATE * C.HEADDIM
    i = tl.arange(0, C.TILE)
    valid = i < left
    on = i[:, None] == i[None, :]
    # Which of the strict triangles belongs to the first direction.
    first = i[:, None] < i[None, :] if C.REVERSE else i[:, None] > i[None, :]
    of_head = slot.to(tl.int64) * heads + head
    sums1 = sums + of_head * directions * (C.FACTORS * C.CHUNK) if C.FACTORS else sums
    sums2 = sums + (of_head * directions + 1) * (C.FACTORS * C.CHUNK) if C.FACTORS else sums
    # The states of a direction that is carried along are not there.
    of_slot = of_head * (1 if C.WALK else directions)
    at_v = v + b * v_b + t * v_l + head * v_h
    at_w1 = w1 + b * w1_b + t * w1_l + head * w1_h if C.SCALED1 else w1
    at_w2 = w2 + b * w2_b + t * w2_l + head * w2_h if C.SCALED2 else w2
    row_sum = tl.zeros((C.TILE,), tl.float32)
    out = tl.zeros((C.TILE, C.BLOCK_P), tl.float32)
    out2 = out
    if C.WALK:
        out, row_sum = read_carried(whole1, h, z, sums1, place, left, r0, C.REVERSE, C.GATED1, C)
    elif C.STORED or tiles > 1:
        out, row_sum = read_state(
            whole1, at_q1, q1_l, at_k1, k1_l, at_v, v_l, at_w1, w1_l, sums1,
            states + of_slot * elements if C.STORED else states,
            vectors + of_slot * C.D_STATE if C.STORED and C.NORMALIZE else vectors,
            C.INITIAL | (ends if C.REVERSE else starts), r0, place, left, p0, C.REVERSE, C.GATED1, C.SCALED1, C,
        )  # fmt: skip
    if C.TWO and (C.STORED or tiles > 1):
        of_slot += 0 if C.WALK else 1
        out2, sums_read = read_state(
            whole2, at_q2, q2_l, at_k2, k2_l, at_v, v_l, at_w2, w2_l, sums2,
            states + of_slot * elements if C.STORED else states,
            vectors + of_slot * C.D_STATE if C.STORED and C.NORMALIZE else vectors, C.INITIAL | ends, r0, place, left,
            p0, True, C.GATED2, C.SCALED2, C,
        )  # fmt: skip
        row_sum += sums_read
        if C.COMBINE == "add":
            out += out2
    if not SHARED:
        # Here and not further up, so that fewer tiles are in registers at the same time.
        scores, own1, own2 = tile_scores(
            whole1, at_q1, q1_l, at_k1, k1_l, whole2, at_q2, q2_l, at_k2, k2_l, place, left, C
        )
    matrix = scores
    if C.GATED1 or C.GATED2:
        exponent = layout.tile_exponents(sums1, i, r0, False, C.REVERSE, C.GATED1, C)
        if C.TWO:
            other = layout.tile_exponents(sums2, i, r0, False, True, C.GATED2, C)
            exponent = tl.where(~(first | on), other, exponent)
        matrix *= tl.exp2(exponent)
    # The diagonal: each direction's own terms (without shift), then the given one.
    own = own1 * self_weight
    also = own2 * self_weight
    scale1 = 1.0
    scale2 = 1.0
    if C.SCALED1:
        given1 = layout.settled(layout.load_factor(at_w1, w1_l, i, valid))
        scale1 = given1[None, :]
        own *= given1
    if C.SCALED2:
        given2 = layout.settled(layout.load_factor(at_w2, w2_l, i, valid))
        scale2 = given2[None, :]
        also *= given2
    if C.SCALED1 or C.SCALED2:
        # Chosen products, not products with what is chosen: that takes more instructions.
        matrix = tl.where(first, matrix * scale1, matrix * scale2) if C.TWO else matrix * scale1
    given = tl.zeros((C.TILE,), tl.float32)
    if C.DIAGONAL:
        given += layout.load_factor(d + b * d_b + t * d_l + head * d_h, d_l, i, valid)
    # What stands outside of the triangles is anything up to here.
    if not C.TWO:
        matrix = tl.where(first, matrix, 0.0)

    values = layout.load_rows(at_v, v_l, i, valid, p0, C.HEADDIM, C.BLOCK_P)
    if C.COMBINE == "add":
        matrix = tl.where(on, (own + also + given)[:, None], matrix)
        out = tl.dot(matrix.to(values.dtype), values, acc=out, input_precision=C.PRECISION)
        if C.NORMALIZE:
            row_sum += tl.sum(matrix, 1)
    else:
        # Where the halves are multiplied the given diagonal is added at the end.
        in_both = given if C.COMBINE == "concat" else tl.zeros((C.TILE,), tl.float32)
        half = tl.where(on, (own + in_both)[:, None], tl.where(first, matrix, 0.0))
        out = tl.dot(half.to(values.dtype), values, acc=out, input_precision=C.PRECISION)
        half = tl.where(on, (also + in_both)[:, None], tl.where(first, 0.0, matrix))
        out2 = tl.dot(half.to(values.dtype), values, acc=out2, input_precision=C.PRECISION)

    if C.NORMALIZE:
        out /= (row_sum + eps)[:, None]
        if p0 == 0:
            tl.store(row_sums + (b * seqlen + t + i) * heads + head, row_sum, mask=valid)
    p = p0 + tl.arange(0, C.BLOCK_P)
    target = b * y_b + t * y_l + head * y_h
    at = i[:, None] * y_l + p[None, :]
    inside = valid[:, None]
    if C.HEADDIM % C.BLOCK_P != 0:
        inside = inside & (p[None, :] < C.HEADDIM)
    if C.COMBINE == "add":
        rounded = out.to(y.dtype.element_ty)
        tl.store(y + target + at, rounded, mask=inside)
        if C.REST:
            tl.store(rest + target + at, (out - rounded.to(tl.float32)).to(y.dtype.element_ty), mask=inside)
    elif C.COMBINE == "concat":
        tl.store(y + target + at, out.to(y.dtype.element_ty), mask=inside)
        tl.store(y + target + C.HEADDIM + at, out2.to(y.dtype.element_ty), mask=inside)
    else:
        out *= out2
        if C.DIAGONAL:
            out += given[:, None] * values.to(tl.float32)
        tl.store(y + target + at, out.to(y.dtype.element_ty), mask=inside)
    if C.WALK:
        edge_high = place * 0.0
        edge_low = edge_high
        if C.GATED1:
            edge_high, edge_low, _, _, through = layout.tile_edges(sums1, r0, C.REVERSE, C)
            h *= tl.exp2(through)
            z *= tl.exp2(through)
        h, z = layout.add_tile(
            h, z, at_k1, k1_l, at_v, v_l, at_v, v_l, at_w1, w1_l, sums1, edge_high, edge_low, r0, place, left, 0, p0,
            C.REVERSE, False, C.GATED1, C.SCALED1, C,
        )  # fmt: skip
    return h, z


@triton.jit
def open_tile(
    q1, q1_b, q1_l, q1_g, k1, k1_b, k1_l, k1_g, q2, q2_b, q2_l, q2_g, k2, k2_b, k2_l, k2_g, b, t, group, place, left,
    C: tl.constexpr,
):  # fmt: skip
    """The pointers to a tile's q and k of both directions, and the (first BLOCK_N elements of the) q that its tokens
    read with."""
    i = tl.arange(0, C.TILE)
    at_q1 = q1 + b * q1_b + t * q1_l + group * q1_g
    at_k1 = k1 + b * k1_b + t * k1_l + group * k1_g
    at_q2 = at_q1
    at_k2 = at_k1
    source, readable = layout.shifted(i, place, left, C.REVERSE, C.SHIFT)
    whole1 = layout.load_rows(at_q1, q1_l, source, readable, 0, C.D_STATE, C.BLOCK_N)
    whole2 = whole1
    if C.TWO:
        at_q2 = q2 + b * q2_b + t * q2_l + group * q2_g
        at_k2 = k2 + b * k2_b + t * k2_l + group * k2_g
        source, readable = layout.shifted(i, place, left, True, C.SHIFT)
        whole2 = layout.load_rows(at_q2, q2_l, source, readable, 0, C.D_STATE, C.BLOCK_N)
    return at_q1, at_k1, at_q2, at_k2, whole1, whole2


@triton.jit(do_not_specialize=["seqlen", "per_row", "self_weight", "eps"])
def mix(
    y, y_b, y_l: tl.constexpr, y_h, row_sums, rest, v, v_b, v_l: tl.constexpr, v_h, q1, q1_b, q1_l: tl.constexpr, q1_g,
    k1, k1_b, k1_l: tl.constexpr, k1_g, q2, q2_b, q2_l: tl.constexpr, q2_g, k2, k2_b, k2_l: tl.constexpr, k2_g, d, d_b,
    d_l: tl.constexpr, d_h, w1, w1_b, w1_l: tl.constexpr, w1_h, w2, w2_b, w2_l: tl.constexpr, w2_h, sums, states,
    vectors, table, seqlen, per_row, heads, share, self_weight, eps, C: tl.constexpr,
):  # fmt: skip
    """y = M v of one tile, HEADS heads and BLOCK_P channels; with WALK of one document and one head. `table` is that of
    chunks, or with WALK cu_seqlens. The first direction runs backward if REVERSE; a second one always does."""
    parts = heads // C.HEADS
    h0 = tl.program_id(0) % parts * C.HEADS
    unit = tl.program_id(0) // parts
    p0 = tl.program_id(1) * C.BLOCK_P
    group = (h0 // share).to(tl.int64)
    SHARED: tl.constexpr = C.HEADS > 1
    if C.WALK:
        begin, length = bounds(unit, table, seqlen, C.PACKED)
        before = first_slot(unit, begin, per_row, C.CHUNK, C.PACKED)
        batch_row = unit * 0 if C.PACKED else unit
        steps = tl.cdiv(length, C.TILE)
    else:
        slot = unit // (C.CHUNK // C.TILE)
        r0 = unit % (C.CHUNK // C.TILE) * C.TILE
        chunk, batch_row, begin, length = located(slot, table, seqlen, per_row, C.PACKED)
        place = chunk * C.CHUNK + r0
        left = length - place
        if left <= 0:
            return
        if C.WHOLE:
            tl.assume(left >= C.TILE)
        steps = C.HEADS
    b = batch_row.to(tl.int64)
    scores = tl.zeros((C.TILE, C.TILE), tl.float32)
    own1 = tl.zeros((C.TILE,), tl.float32)
    own2 = own1
    h = tl.zeros((C.BLOCK_N, C.BLOCK_P), tl.float32)
    z = tl.zeros((C.BLOCK_N,), tl.float32)
    if not C.WALK:
        t = (begin + place).to(tl.int64)
        at_q1, at_k1, at_q2, at_k2, whole1, whole2 = open_tile(
            q1, q1_b, q1_l, q1_g, k1, k1_b, k1_l, k1_g, q2, q2_b, q2_l, q2_g, k2, k2_b, k2_l, k2_g, b, t, group, place,
            left, C,
        )  # fmt: skip
        if SHARED:
            scores, own1, own2 = tile_scores(
                whole1, at_q1, q1_l, at_k1, k1_l, whole2, at_q2, q2_l, at_k2, k2_l, place, left, C
            )
    for step in tl.range(steps, num_stages=1):
        head = h0.to(tl.int64)
        if C.WALK:
            place = (steps - 1 - step if C.REVERSE else step) * C.TILE
            chunk = place // C.CHUNK
            r0 = place % C.CHUNK
            slot = before + chunk
            left = length - place
            if C.WHOLE:
                tl.assume(left >= C.TILE)
            t = (begin + place).to(tl.int64)
            at_q1, at_k1, at_q2, at_k2, whole1, whole2 = open_tile(
                q1, q1_b, q1_l, q1_g, k1, k1_b, k1_l, k1_g, q2, q2_b, q2_l, q2_g, k2, k2_b, k2_l, k2_g, b, t, group,
                place, left, C,
            )  # fmt: skip
        else:
            head += step
        h, z = mix_tile(
            y, y_b, y_l, y_h, row_sums, rest, v, v_b, v_l, v_h, at_q1, q1_l, at_k1, k1_l, at_q2, q2_l, at_k2, k2_l, d,
            d_b, d_l, d_h, w1, w1_b, w1_l, w1_h, w2, w2_b, w2_l, w2_h, sums, states, vectors, whole1, whole2, scores,
            own1, own2, h, z, b, t, head, slot, r0, place, left, chunk > 0, (chunk + 1) * C.CHUNK < length, p0, seqlen,
            heads, self_weight, eps, SHARED, C,
        )  # fmt: skip
