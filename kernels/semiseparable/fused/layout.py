"""Functions that all scan kernels share: reading tiles, decays between tokens, and states at the edges of tiles.

A chunk is what lies between two stored states; a tile is a part of it, whose pairs of tokens one program looks at.
Tokens of different chunks meet through states only.

Exponents are sums of log-decays in units of log 2 over a chunk. They stand in a table that sums.py makes once, FACTORS
rows of CHUNK numbers for each slot, head and direction. For float32 inputs sums are two float32 numbers: a difference
of two long sums of strong decays, rounded once, would lose the weak decays between them.

Indices of tokens count from the tile's first token, which pointers stand at: `place` tokens of the document come before
it, `left` tokens are left from it on. Sums of a tile are read at `sums + r0`, r0 being its place in the chunk. With
WHOLE all chunks are full, and no token is looked for.

Two tiles of a chunk, writers in one and readers in the other, meet across the edge between them, so that the decay of a
pair is the product of two numbers, one of its writer and one of its reader. These go to values and cotangents before
they are multiplied, and no matrix of pairs has to be weighted.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(x, stride, index, valid, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows `index` of a matrix, columns from `first` on, (rows, BLOCK): zero beyond WIDTH and where not `valid`."""
    column = first + tl.arange(0, BLOCK)
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (column[None, :] < WIDTH)
    return tl.load(x + index[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def settled(x):
    """x (TILE,), which the compiler would load and compute again, many numbers a thread, where it is broadcast along
    rows: sums are not computed twice."""
    return tl.sum(x[:, None], 1)


@triton.jit
def load_factor(x, stride, index, valid):
    """A number per token in float32; 0 where there is no token."""
    return tl.load(x + index * stride, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def state_places(n0, p0, BLOCK_N: tl.constexpr, C: tl.constexpr):
    """Returns the offsets of the elements of a tile (BLOCK_N, BLOCK_P) of a state, and which of them exist."""
    n = n0 + tl.arange(0, BLOCK_N)
    p = p0 + tl.arange(0, C.BLOCK_P)
    if C.D_STATE % BLOCK_N == 0 and C.HEADDIM % C.BLOCK_P == 0:
        inside = tl.full((BLOCK_N, C.BLOCK_P), True, tl.int1)
    else:
        inside = (n[:, None] < C.D_STATE) & (p[None, :] < C.HEADDIM)
    return n[:, None] * C.HEADDIM + p[None, :], inside


@triton.jit
def shifted(index, place, left, REVERSE: tl.constexpr, SHIFT: tl.constexpr):
    """Returns the place of the q that a token reads with (its neighbour's with SHIFT), and whether both exist."""
    source = index + ((1 if REVERSE else -1) if SHIFT else 0)
    return source, (index < left) & (source < left) & (source >= -place)


@triton.jit
def edge_sum(sums, index, C: tl.constexpr):
    """The sum up to and with the chunk's token `index`, as two floats; 0 before the first one."""
    inside = (index >= 0) & (index < C.CHUNK)
    high = tl.load(sums + index, mask=inside, other=0.0)
    low = tl.load(sums + C.CHUNK + index, mask=inside, other=0.0) if C.EXACT else high
    return high, low


@triton.jit
def write_sums(sums, index, C: tl.constexpr):
    """The sums up to where tokens write: their own decays come before."""
    high = tl.load(sums + index)
    low = tl.load(sums + C.CHUNK + index) if C.EXACT else high
    return high, low


@triton.jit
def read_sums(sums, index, r0, REVERSE: tl.constexpr, C: tl.constexpr):
    """The sums up to where tokens read: with SHIFT their own decays come after."""
    if C.SHIFT:
        index += 1 if REVERSE else -1
        inside = index < C.CHUNK - r0 if REVERSE else index >= -r0
        high = tl.load(sums + index, mask=inside, other=0.0)
        low = tl.load(sums + C.CHUNK + index, mask=inside, other=0.0) if C.EXACT else high
    else:
        high, low = write_sums(sums, index, C)
    return high, low


@triton.jit
def entering_edge(r0, REVERSE: tl.constexpr, TILE: tl.constexpr):
    """The chunk's last token before a tile from r0 on."""
    return r0 + TILE if REVERSE else r0 - 1


@triton.jit
def leaving_edge(r0, REVERSE: tl.constexpr, TILE: tl.constexpr):
    """The chunk's token that is the last of a tile from r0 on."""
    return r0 if REVERSE else r0 + TILE - 1


@triton.jit
def exponents(high, low, from_high, from_low, EXACT: tl.constexpr):
    """Differences of two sums (that broadcast)."""
    difference = high - from_high
    if EXACT:
        difference += low - from_low
    return difference


@triton.jit
def tile_edges(sums, r0, REVERSE: tl.constexpr, C: tl.constexpr):
    """The sums up to where a direction leaves a tile and up to where it enters, two floats each, and the log2 of the
    decay of a state that goes through the tile."""
    high, low = edge_sum(sums, leaving_edge(r0, REVERSE, C.TILE), C)
    from_high, from_low = edge_sum(sums, entering_edge(r0, REVERSE, C.TILE), C)
    return high, low, from_high, from_low, exponents(high, low, from_high, from_low, C.EXACT)


@triton.jit
def tile_exponents(sums, i, r0, WRITERS: tl.constexpr, REVERSE: tl.constexpr, GATED: tl.constexpr, C: tl.constexpr):
    """(TILE, TILE) log2 of the decays between a tile's readers (rows) and writers, or with WRITERS the same turned
    round: anything outside of the direction's triangle, NaN too."""
    if GATED:
        # At the tile's edge a reader's sum may come from a neighbouring row of the table: no writer is before it.
        before = sums + r0 + ((1 if REVERSE else -1) if C.SHIFT else 0)
        read_high, read_low = write_sums(before, i, C)
        write_high, write_low = write_sums(sums + r0, i, C)
    else:
        read_high = i * 0.0
        read_low, write_high, write_low = read_high, read_high, read_high
    if WRITERS:
        return exponents(read_high[None, :], read_low[None, :], write_high[:, None], write_low[:, None], C.EXACT)
    return exponents(read_high[:, None], read_low[:, None], write_high[None, :], write_low[None, :], C.EXACT)


@triton.jit
def add_tile(
    h, z, k, k_l, v, v_l, u, u_l, w, w_l, sums, edge_high, edge_low, r0, place, left, n0, p0, REVERSE: tl.constexpr,
    COTANGENT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """h + sum over the tokens of a tile of weight_t key_t value_t^T, and z the same without values: what the tile adds
    to a state (BLOCK_N, BLOCK_P) behind the token up to which `edge_high` sums. With COTANGENT what it adds to the
    cotangent of that state: the keys are then the q that tokens read with, the values those of dy, and `u` takes the
    place of ones in the vector.

    REVERSE is the direction's own sense.
    """
    i = tl.arange(0, C.TILE)
    valid = i < left
    source, present = shifted(i, place, left, REVERSE, C.SHIFT and COTANGENT)
    keys = load_rows(k, k_l, source, present, n0, C.D_STATE, C.BLOCK_N)
    values = load_rows(v, v_l, i, valid, p0, C.HEADDIM, C.BLOCK_P)
    weight = tl.where(valid, 1.0, 0.0)
    if GATED:
        if COTANGENT:
            high, low = read_sums(sums + r0, i, r0, REVERSE, C)
            weight = tl.exp2(exponents(high, low, edge_high, edge_low, C.EXACT))
        else:
            high, low = write_sums(sums + r0, i, C)
            weight = tl.exp2(exponents(edge_high, edge_low, high, low, C.EXACT))
    if SCALED:
        weight *= load_factor(w, w_l, i, valid)
    if GATED or SCALED:
        values = (values.to(tl.float32) * weight[:, None]).to(keys.dtype)
    h = tl.dot(tl.trans(keys), values, acc=h, input_precision=C.PRECISION)
    if C.NORMALIZE:
        if COTANGENT:
            weight *= load_factor(u, u_l, i, valid)
        z += tl.sum(keys.to(tl.float32) * weight[:, None], 0)
    return h, z


@triton.jit
def state_dot(x, state, acc, PRECISION: tl.constexpr):
    """acc + x state, where the state may hold more than x's dtype can: float16 ends at 65,504, states do not."""
    if x.dtype == tl.float16:
        acc = tl.dot(x.to(tl.float32), state.to(tl.float32), acc=acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, state.to(x.dtype), acc=acc, input_precision=PRECISION)
    return acc


@triton.jit
def side_scores(whole, rows, rows_l, cols, cols_l, from_i, inside_i, from_j, inside_j, C: tl.constexpr):
    """Scalar products of all rows with all columns, (TILE, TILE) float32. `whole`: the rows, loaded before, where one
    block holds all of d_state."""
    if C.D_STATE <= C.BLOCK_N:
        c = load_rows(cols, cols_l, from_j, inside_j, 0, C.D_STATE, C.BLOCK_N)
        scores = tl.dot(whole, tl.trans(c), input_precision=C.PRECISION)
    else:
        scores = tl.zeros((C.TILE, C.TILE), tl.float32)
        for n0 in tl.static_range(0, C.D_STATE, C.BLOCK_N):
            x = load_rows(rows, rows_l, from_i, inside_i, n0, C.D_STATE, C.BLOCK_N)
            c = load_rows(cols, cols_l, from_j, inside_j, n0, C.D_STATE, C.BLOCK_N)
            scores = tl.dot(x, tl.trans(c), acc=scores, input_precision=C.PRECISION)
    return scores


@triton.jit
def cross_scores(q, q_l, k, k_l, place, left, ahead, forward, C: tl.constexpr):
    """Scores (TILE, TILE) of this tile's writers (rows) and the other one's readers, typed like q and k, and the same
    turned round in float32. The other tile is `ahead` of this one, and reads in the direction that runs `forward` or
    not."""
    i = tl.arange(0, C.TILE)
    valid = i < left
    source = i + ahead
    readable = source < left
    if C.SHIFT:
        source += tl.where(forward, -1, 1)
        readable = readable & (source < left) & (source >= -place)
    c = load_rows(k, k_l, i, valid, 0, C.D_STATE, C.BLOCK_N)
    x = load_rows(q, q_l, source, readable, 0, C.D_STATE, C.BLOCK_N)
    scores = side_scores(c, k, k_l, q, q_l, i, valid, source, readable, C)
    turned = side_scores(x, q, q_l, k, k_l, source, readable, i, valid, C)
    return scores.to(x.dtype), turned


@triton.jit
def cross_decays(sums, r0, ahead, forward, C: tl.constexpr):
    """(TILE,) decays between this tile's writers and the edge, and between the edge and the other tile's readers.
    `sums` are the first direction's; the second one's follow."""
    i = tl.arange(0, C.TILE)
    writes = i * 0.0 + 1.0
    reads = writes
    if C.GATED1 or C.GATED2:
        edge_high, edge_low = edge_sum(sums, tl.where(forward, C.TILE - 1, C.TILE), C)
        high, low = write_sums(sums + r0, i, C)
        decays = tl.exp2(exponents(edge_high, edge_low, high, low, C.EXACT))
        step = tl.where(forward, -1, 1) if C.SHIFT else 0
        high, low = write_sums(sums + (r0 + ahead + step), i, C)
        until = tl.exp2(exponents(high, low, edge_high, edge_low, C.EXACT))
        if C.TWO and C.GATED1 != C.GATED2:
            gated = forward if C.GATED1 else forward == False  # noqa: E712 (a tensor)
            writes = tl.where(gated, decays, writes)
            reads = tl.where(gated, until, reads)
        else:
            writes = decays
            reads = until
    return writes, reads


@triton.jit
def cross_values(out, pairs, written, scores, value, grad, writes, reads, PRECISION: tl.constexpr):
    """Returns what BLOCK_P channels add to the gradient of this tile's values (TILE, BLOCK_P), to the products (TILE,
    TILE) of the other tile's weighted cotangents (rows) and the values, and to the sum (TILE,) over the pairs of a
    writer, before its own decay and input scale.

    `writes` and `reads` weight the values of this tile and the cotangents `grad` of the other one.
    """
    reading = (grad.to(tl.float32) * reads[:, None]).to(value.dtype)
    pairs = tl.dot(reading, tl.trans(value), acc=pairs, input_precision=PRECISION)
    met = tl.dot(scores, reading, input_precision=PRECISION)
    written += tl.sum(met * value.to(tl.float32), 1)
    return out + met * writes[:, None], pairs, written
