"""Triton kernel of the Cayley transform: all state matrices of a pass, many tokens at a time.

I - S is inverted by a Gauss-Jordan elimination with row pivoting, in float32, for a matrix in one or two lanes of a
warp: its columns are tensors (matrices, rows), so that a step needs hardly any exchange between lanes. Rows are not
swapped but marked. What is chosen by a mask is chosen bit by bit, as most GPUs do that in one instruction.

The elimination loses digits where elements are large. X is orthogonal whatever they are, so that the rest of its error
is made third order by X (1 + E / 2 + 3 E^2 / 8), E = 1 - X^T X: the first terms of X (X^T X)^(-1/2).
"""

import triton
import triton.language as tl

from matmix.kernels.matrix_product.passes import multiply
from matmix.kernels.mru.build import block_places, elements_of, identity, load_weights, token_places

ONE = tl.constexpr(0x3F800000)
"""Bits of 1.0."""


@triton.jit
def bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def number(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def in_chosen_row(column, others):
    """Returns the number (matrices,) in each matrix's chosen row of a column (matrices, o)."""
    return number(tl.xor_sum(bits(column) & ~others, axis=1))


@triton.jit
def hidden(row):
    """The same numbers, which the compiler does not know to be consecutive: it would spread a matrix over more lanes
    to read them side by side."""
    return row * (row + 1) // 2 - row * (row - 1) // 2


@triton.jit
def eliminate(columns, at_chosen, there, MATRICES: tl.constexpr, C: tl.constexpr):
    """Inverses of matrices given by columns (MATRICES, ORDER), of which row i and column j are here: row `step[i]` and
    column i where `step[i]` is j. Rows have to be multiplied by `scale`, (MATRICES, ORDER) as `step`. The row of each
    step goes to `at_chosen` (MATRICES,)."""
    place = tl.arange(0, C.ORDER)[None, :] + tl.zeros((MATRICES, C.ORDER), tl.int32)
    scale, step = tl.zeros_like(place), tl.zeros_like(place)
    for two in range(C.ORDER // 2):
        # Two steps move fewer registers than one and one.
        for one in tl.static_range(2):
            now = 2 * two + one
            # The first column is eliminated; the others move forward by one. The largest number is chosen; its last
            # bits make room for its place, and those chosen before are below all others.
            first = columns[0]
            key = (bits(first) & 0x7FFFFFF0) | place
            largest = tl.max(key, axis=1)
            others = (key - largest[:, None]) >> 31
            place = place | ~others
            tl.store(at_chosen + now, (largest & 15).to(tl.int8), mask=there)
            reciprocal = 1.0 / in_chosen_row(first, others)
            # 2 (I - S)^-1 is wanted.
            scale = (scale & others) | (bits(2.0 * reciprocal)[:, None] & ~others)
            step = (step & others) | (now & ~others)
            share = bits(first * -reciprocal[:, None]) & others
            rest = ()
            for j in tl.static_range(1, C.ORDER):
                rest += (columns[j] + number(share) * in_chosen_row(columns[j], others)[:, None],)
            rest += (number(share | (ONE & ~others)),)
            columns = rest
    return columns, number(scale), step


@triton.jit
def triangle_columns(elements, C: tl.constexpr):
    """Columns of I - S from pointers (MATRICES, 1) to the first elements."""
    row = tl.arange(0, C.ORDER)[None, :]
    below, above = elements + row * (row - 1) // 2, elements + hidden(row)
    columns = ()
    for j in tl.static_range(C.ORDER):
        at = tl.where(row > j, below + j, tl.where(row < j, above + j * (j - 1) // 2, elements))
        value = tl.load(at).to(tl.float32)
        columns += (tl.where(row > j, -value, tl.where(row == j, 1.0, value)),)
    return columns


@triton.jit
def skew_columns(skew, C: tl.constexpr):
    """Columns of I - S from pointers (MATRICES, 1) to the matrices S."""
    row, c = tl.arange(0, C.ORDER)[None, :], tl.arange(0, 4)[None, None, :]
    columns = ()
    for j in tl.static_range(0, C.ORDER, 4):
        four = tl.load((skew + row * C.ORDER)[:, :, None] + (j + c))
        for i in tl.static_range(4):
            column = number(tl.xor_sum(tl.where(c == i, bits(four), 0), axis=2))
            columns += (tl.where(row == j + i, 1.0, -column),)
    return columns


@triton.jit
def store_columns(out, there, columns, scale, MATRICES: tl.constexpr, C: tl.constexpr):
    """Write columns times `scale` as matrices, from pointers (MATRICES, 1) to their first places."""
    row, c = tl.arange(0, C.ORDER)[None, :], tl.arange(0, 4)[None, None, :]
    for j in tl.static_range(0, C.ORDER, 4):
        four = tl.zeros((MATRICES, C.ORDER, 4), tl.float32)
        for i in tl.static_range(4):
            four = tl.where(c == i, (columns[j + i] * scale)[:, :, None], four)
        tl.store((out + row * C.ORDER)[:, :, None] + (j + c), four, mask=there[:, :, None])


@triton.jit(do_not_specialize=["seqlen"])
def cayley_pass(elements, e_b, e_l, w_up, d_c, y, order, seqlen, heads, C: tl.constexpr):
    """2 (I - S)^-1 of TOKENS tokens and the heads of one tile into `y` (batch, seqlen, nheads, o, o), its rows and
    columns in the order of the elimination: `order` (batch, seqlen, nheads, 2, o), int8, has for each row its step, and
    for each step its row."""
    PER: tl.constexpr = C.TILE // C.ORDER
    MATRICES: tl.constexpr = C.TOKENS * PER
    parts = tl.cdiv(seqlen, C.TOKENS)
    row_ = tl.program_id(0) // parts
    start = (tl.program_id(0) % parts) * C.TOKENS
    h0 = tl.program_id(1) * PER
    size = heads * C.ORDER * C.ORDER
    first = row_.to(tl.int64) * seqlen + start
    count = tl.minimum(C.TOKENS, seqlen - start)
    at = elements + row_.to(tl.int64) * e_b + start.to(tl.int64) * e_l
    at_y = y + first * size
    if C.CHUNKED:
        head, row, column, same, inside = block_places(heads, h0, C)
        places, read, _ = token_places(head, row, column, inside, heads, h0, d_c, C)
        up = load_weights(w_up, heads, h0, d_c, C)
        at_token, at_skew = at, at_y
        for _ in range(count):
            given = tl.load(at_token + places, mask=read, other=0.0).to(tl.float32)
            m = elements_of(given, up, row, column, same, C)
            matrix = (head * C.ORDER + row) * C.ORDER + column
            tl.store(at_skew + matrix, tl.where(row > column, m, -m), mask=inside)
            at_token += e_l
            at_skew += size
        tl.debug_barrier()
    n = tl.arange(0, MATRICES)[:, None]
    there = (n // PER < count) & (h0 + n % PER < heads)
    # What is not there is the last one again, and not written.
    token_n, head_n = tl.minimum(n // PER, count - 1), tl.minimum(h0 + n % PER, heads - 1)
    own = at_y + token_n * size + head_n * (C.ORDER * C.ORDER)
    if C.CHUNKED:
        columns = skew_columns(own, C)
        tl.debug_barrier()
    else:
        own_elements = at + token_n.to(tl.int64) * e_l + head_n * (C.ORDER * (C.ORDER - 1) // 2)
        columns = triangle_columns(own_elements, C)
    at_order = order + first * (heads * 2 * C.ORDER) + (token_n * heads + head_n) * (2 * C.ORDER)
    at_chosen = tl.reshape(at_order + C.ORDER, (MATRICES,))
    columns, scale, step = eliminate(columns, at_chosen, tl.reshape(there, (MATRICES,)), MATRICES, C)
    store_columns(own, there, columns, scale, MATRICES, C)
    tl.store(at_order + hidden(tl.arange(0, C.ORDER)[None, :]), step.to(tl.int8), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def polish_pass(x, order, tokens, heads, C: tl.constexpr):
    """X of COUNT tokens and the heads of one tile, in place of what `cayley_pass` left."""
    start = tl.program_id(0).to(tl.int64) * C.COUNT
    h0 = tl.program_id(1) * (C.TILE // C.ORDER)
    size = heads * C.ORDER * C.ORDER
    # Transposed: a lane then reads numbers that lie side by side, those of a column of X.
    head, column, row, _, inside = block_places(heads, h0, C)
    of_row = h0 + tl.arange(0, C.TILE)[None, :] // C.ORDER
    if C.ORDER == C.TILE:
        exists_column, exists_row = head == h0, of_row == h0
    else:
        exists_column, exists_row = head < heads, of_row < heads
    at_column = order + start * (heads * 2 * C.ORDER) + head * (2 * C.ORDER) + column
    at_row = order + start * (heads * 2 * C.ORDER) + of_row * (2 * C.ORDER) + row
    at = x + start * size + head * (C.ORDER * C.ORDER)
    for _ in range(tl.minimum(C.COUNT, tokens - start)):
        from_column = tl.load(at_column, mask=exists_column, other=0).to(tl.int32)
        diagonal = tl.load(at_column + C.ORDER, mask=exists_column, other=0).to(tl.int32)
        to_row = tl.load(at_row, mask=exists_row, other=0).to(tl.int32)
        # Rows stay in the order of the elimination until they are written: X^T X does not depend on it.
        y = tl.load((at + from_column) + row * C.ORDER, mask=inside, other=0.0)
        y = tl.where(inside & (diagonal == row), y - 1.0, y)
        e = identity(C.TILE) - multiply(y, tl.trans(y), C.PRECISION)
        # As E is symmetric, its transpose can stand for it where that is nearer.
        small = e.to(tl.bfloat16)
        y += multiply(0.5 * e + 0.375 * tl.dot(small, tl.trans(small)), y, C.PRECISION)
        tl.debug_barrier()
        tl.store((at + to_row * C.ORDER) + column, y, mask=inside)
        at += size
        at_column += heads * 2 * C.ORDER
        at_row += heads * 2 * C.ORDER
