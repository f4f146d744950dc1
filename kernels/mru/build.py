"""State matrices in registers: a tile whose diagonal blocks are the matrices of neighbouring heads, from their
elements or a token's chunks, and the gradient of these from that of the tile."""

import triton
import triton.language as tl

from matmix.kernels.matrix_product.passes import multiply, turned_places


@triton.jit
def block_places(heads, h0, C: tl.constexpr, TURNED: tl.constexpr = False):
    """Head, row in its matrix and column in its matrix of every place of a tile, and whether it is in a block at all
    and of a head that exists. The rows can be `turned`."""
    i = tl.arange(0, C.TILE)
    r = turned_places(C.TILE) if TURNED else i
    head = (h0 + r // C.ORDER)[:, None]
    row, column = (r % C.ORDER)[:, None], (i % C.ORDER)[None, :]
    same = (r // C.ORDER)[:, None] == (i // C.ORDER)[None, :]
    # The only head of a tile exists.
    inside = same if C.ORDER == C.TILE else same & (head < heads)
    return head, row, column, same, inside


@triton.jit
def element_offsets(head, row, column, C: tl.constexpr):
    """Returns the offset of the element of each place of the tile, from a token's first one.

    Cayley's elements are a lower triangle, row by row; its places above the diagonal take their mirror image's.
    """
    if C.CONSTRUCTION == "cayley":
        low, high = tl.minimum(row, column), tl.maximum(row, column)
        offsets = head * (C.ORDER * (C.ORDER - 1) // 2) + high * (high - 1) // 2 + low
    elif C.CONSTRUCTION == "affine":
        offsets = head * (C.ORDER * (C.ORDER // 2)) + row * (C.ORDER // 2) + column
    else:
        offsets = head * (C.ORDER * C.ORDER) + row * C.ORDER + column
    return offsets


@triton.jit
def row_places(heads, h0, columns, C: tl.constexpr, TURNED: tl.constexpr = False):
    """Returns offsets of the rows of the tile's heads, `columns` numbers each, and which places (TILE, WIDTH)
    are there."""
    i = turned_places(C.TILE) if TURNED else tl.arange(0, C.TILE)
    c = tl.arange(0, C.WIDTH)
    there = (h0 + i // C.ORDER < heads)[:, None] & (c < columns)[None, :]
    return (h0 * C.ORDER + i)[:, None] * columns + c[None, :], there


@triton.jit
def load_weights(weights, heads, h0, columns, C: tl.constexpr, TURNED: tl.constexpr = False):
    """Weights (nheads, o, columns) of the tile's heads below each other, (TILE, WIDTH) float32."""
    places, there = row_places(heads, h0, columns, C, TURNED)
    return tl.load(weights + places, mask=there, other=0.0).to(tl.float32)


@triton.jit
def token_places(head, row, column, inside, heads, h0, d_c, C: tl.constexpr):
    """Returns offsets of a tile's numbers from a token's first, which of them are read, and which are written as
    gradients: elements at their places of the tile, or chunks (TILE, WIDTH)."""
    if C.CHUNKED:
        places, read = row_places(heads, h0, d_c, C)
        written = read
    else:
        places = element_offsets(head, row, column, C)
        read = element_places(row, column, inside, False, C)
        written = element_places(row, column, inside, True, C)
    return places, read, written


@triton.jit
def elements_of(given, up, row, column, same, C: tl.constexpr):
    """Elements at their places of the tile, 0 outside the blocks, from what a token gives: these, or chunks and the
    weights by column, both (TILE, WIDTH); for a triangle's M - M^T the weights come divided by sqrt(2)."""
    elements = given
    if C.CHUNKED:
        elements = tl.where(same, tl.dot(given, tl.trans(up), input_precision=C.PROJECTION), 0.0)
        if C.CONSTRUCTION == "cayley":
            skew = elements - tl.trans(elements)
            elements = tl.where(row > column, skew, -skew)
    return elements


@triton.jit
def identity(TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    return tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit
def block_sums(by_column, same):
    """Sums over a matrix's columns (TILE,), at each of its rows (TILE,)."""
    return tl.sum(tl.where(same, by_column[None, :], 0.0), axis=1)


@triton.jit
def ldu_factors(m, row, column, same, C: tl.constexpr):
    """tril(M, -1) + D and triu(M, 1) + D with D = exp((diag - mean diag) / 2); also D's diagonal."""
    diagonal = same & (row == column)
    on = tl.where(diagonal, m, 0.0)
    mean = block_sums(tl.sum(on, axis=0), same) / C.ORDER
    scale = tl.exp((tl.sum(on, axis=1) - mean) * 0.5)
    on = tl.where(diagonal, scale[:, None], 0.0)
    lower = tl.where(row > column, m, on)
    upper = tl.where(row < column, m, on)
    return lower, upper, scale


@triton.jit
def affine_rows(elements, row, column, same, C: tl.constexpr):
    """The rows of [I + M_1; 0] and, at each row, the sum of absolute values that it is divided by, 1 or more."""
    k: tl.constexpr = C.ORDER // 2
    one = tl.where(same & (row == column), 1.0, 0.0)
    rows = tl.where(same & (row < k) & (column < k), elements + one, 0.0)
    return rows, tl.maximum(tl.sum(tl.abs(rows), axis=1), 1.0)


@triton.jit
def affine(elements, row, column, same, C: tl.constexpr):
    """[[A, 0], [B, I]]: A the scaled rows of I + M_1, B = M_2."""
    k: tl.constexpr = C.ORDER // 2
    rows, sizes = affine_rows(elements, row, column, same, C)
    rest = tl.where(column < k, elements, tl.where(same & (row == column), 1.0, 0.0))
    return tl.where(row < k, rows / sizes[:, None], rest)


@triton.jit
def build(elements, row, column, same, C: tl.constexpr):
    """X from the loaded elements (TILE, TILE) float32, 0 outside the blocks; zeros give the identity. "given" is
    X itself."""
    if C.CONSTRUCTION == "given":
        x = elements
    elif C.CONSTRUCTION == "ldu":
        lower, upper, _ = ldu_factors(elements, row, column, same, C)
        x = multiply(lower, upper, C.PRECISION)
    elif C.CONSTRUCTION == "affine":
        x = affine(elements, row, column, same, C)
    else:
        x = elements + tl.where(same & (row == column), 1.0, 0.0)
    return x


@triton.jit
def build_gradient(dx, x, elements, row, column, same, C: tl.constexpr):
    """The gradient of the elements, at the places that `element_places` names."""
    if C.CONSTRUCTION == "cayley":
        # (I - S)^-1 = (X + I) / 2 =: R, dL/dS = 2 R^T dX R^T, and an element stands in S twice, with both signs.
        plus = tl.trans(x + identity(C.TILE))
        full = multiply(multiply(plus, dx, C.PRECISION), plus, C.PRECISION)
        gradient = (full - tl.trans(full)) * 0.5
    elif C.CONSTRUCTION == "ldu":
        lower, upper, scale = ldu_factors(elements, row, column, same, C)
        of_lower = multiply(dx, tl.trans(upper), C.PRECISION)
        of_upper = multiply(tl.trans(lower), dx, C.PRECISION)
        both = tl.where(same & (row == column), (of_lower + of_upper) * (0.5 * scale)[:, None], 0.0)
        mean = block_sums(tl.sum(both, axis=0), same) / C.ORDER
        on = both - mean[:, None]
        gradient = tl.where(row > column, of_lower, tl.where(row < column, of_upper, on))
    elif C.CONSTRUCTION == "affine":
        _, sizes = affine_rows(elements, row, column, same, C)
        a = tl.where(same & (row < C.ORDER // 2) & (column < C.ORDER // 2), x, 0.0)
        along = tl.where(sizes > 1.0, tl.sum(a * dx, axis=1), 0.0)[:, None]
        signs = tl.where(a > 0.0, 1.0, tl.where(a < 0.0, -1.0, 0.0))
        gradient = tl.where(row < C.ORDER // 2, (dx - signs * along) / sizes[:, None], dx)
    else:
        gradient = dx
    return gradient


@triton.jit
def element_places(row, column, inside, STORED: tl.constexpr, C: tl.constexpr):
    """The places of a tile that have an element, or with STORED those that stand for one element each."""
    if C.CONSTRUCTION == "cayley":
        places = inside & (row > column if STORED else row != column)
    elif C.CONSTRUCTION == "affine":
        places = inside & (column < C.ORDER // 2)
    else:
        places = inside
    return places
