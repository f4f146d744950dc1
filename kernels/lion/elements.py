"""Triton kernels for what LION does with each vector (feature maps, and the division by row sums) and with each gate
(log-decays of both directions from logits, and the gradient of the logits).

A program of the gates takes a piece of a document and some heads. A gate may act one token later in its direction (an
offset of 1): then it is read at the neighbour's place in the document, and there is no decay where there is no
neighbour.
"""

import triton
import triton.language as tl

from matmix.kernels.slots import located, log_one_plus


@triton.jit
def _feature(x, mask, FEATURES: tl.constexpr):
    """Before any division by the length: the feature map of x."""
    if FEATURES == "elu":
        # Comparisons, not minimum and maximum: those would swallow a NaN.
        mapped = tl.where(x > 0.0, x + 1.0, tl.exp(tl.where(x > 0.0, 0.0, x)))
    else:
        mapped = x * tl.sigmoid(x) + 0.5
    return tl.where(mask, mapped, 0.0)


@triton.jit
def _places(rows, vectors, width, C: tl.constexpr):
    """Numbers of vectors, of their tokens and in their tokens, columns, and which elements exist."""
    row = (tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)).to(tl.int64)
    column = tl.arange(0, C.COLUMNS)
    token = row // vectors
    return row, token, row - token * vectors, column, (row < rows)[:, None] & (column < width)[None, :]


@triton.jit(do_not_specialize=["rows"])
def features(x, y, rows, vectors, width, scale, x_stride, C: tl.constexpr):
    """y (tokens, vectors, width), the feature maps of x; the first half of a token's vectors, the queries, times
    `scale`."""
    row, token, vector, column, mask = _places(rows, vectors, width, C)
    at = token * x_stride + vector * width
    mapped = _feature(tl.load(x + at[:, None] + column[None, :], mask, other=0.0).to(tl.float32), mask, C.FEATURES)
    factor = tl.where(vector < vectors // 2, scale, 1.0)
    if C.FEATURES == "silu_norm":
        factor /= tl.sqrt(tl.where(row < rows, tl.sum(mapped * mapped, 1), 1.0))
    tl.store(y + row[:, None] * width + column[None, :], (mapped * factor[:, None]).to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def feature_gradients(dy, x, dx, rows, vectors, width, scale, dy_stride, x_stride, dx_stride, C: tl.constexpr):
    """dx of `features`. dy (tokens, 2, vectors, width) has a gradient from each direction."""
    row, token, vector, column, mask = _places(rows, vectors, width, C)
    at = (token * dy_stride + vector * width)[:, None] + column[None, :]
    gradient = tl.load(dy + at, mask, other=0.0).to(tl.float32)
    gradient += tl.load(dy + at + vectors * width, mask, other=0.0).to(tl.float32)
    gradient *= tl.where(vector < vectors // 2, scale, 1.0)[:, None]
    given = tl.load(x + (token * x_stride + vector * width)[:, None] + column[None, :], mask, other=0.0).to(tl.float32)
    if C.FEATURES == "silu_norm":
        mapped = _feature(given, mask, C.FEATURES)
        factor = 1.0 / tl.sqrt(tl.where(row < rows, tl.sum(mapped * mapped, 1), 1.0))
        normed = mapped * factor[:, None]
        gradient = (gradient - normed * tl.sum(gradient * normed, 1)[:, None]) * factor[:, None]
    if C.FEATURES == "elu":
        gradient *= tl.exp(tl.where(given > 0.0, 0.0, given))
    else:
        sigmoid = tl.sigmoid(given)
        gradient *= sigmoid * (1 + given * (1 - sigmoid))
    at = (token * dx_stride + vector * width)[:, None] + column[None, :]
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def row_gradients(dy, dsums, y, rest, row_sum, dn, drow_sum, rows, vectors, width, eps, dy_stride, C: tl.constexpr):
    """Computes for y = n / (row_sum + eps) dn = dy / (row_sum + eps), as it is rounded, and drow_sum = -dn . y +
    `dsums`, the gradient of the sums themselves."""
    row, token, vector, column, mask = _places(rows, vectors, width, C)
    at = row[:, None] * width + column[None, :]
    divisor = tl.load(row_sum + row, row < rows, other=1.0) + tl.where(row < rows, eps, 0.0)
    given = tl.load(dy + (token * dy_stride + vector * width)[:, None] + column[None, :], mask, other=0.0)
    divided = (given.to(tl.float32) / divisor[:, None]).to(dn.dtype.element_ty)
    tl.store(dn + at, divided, mask)
    out = tl.load(y + at, mask, other=0.0).to(tl.float32)
    if C.REST:
        out += tl.load(rest + at, mask, other=0.0).to(tl.float32)
    total = -tl.sum(divided.to(tl.float32) * out, 1)
    if C.SUMS:
        total += tl.load(dsums + row, row < rows, other=0.0).to(tl.float32)
    tl.store(drow_sum + row, total, row < rows)


@triton.jit
def log_sigmoid(x):
    """-log(1 + exp(-x)), with all digits where it is small."""
    return tl.where(x > 0.0, 0.0, x) - log_one_plus(tl.exp(-tl.abs(x)))


@triton.jit
def _gate_places(table, seqlen, per_row, heads, C: tl.constexpr):
    """First token's row, tokens in the document, its length, and heads."""
    piece, batch_row, begin, length = located(tl.program_id(0), table, seqlen, per_row, C.PACKED)
    token = piece * C.SPAN + tl.arange(0, C.SPAN)
    head = tl.program_id(1) * C.BLOCK_H + tl.arange(0, C.BLOCK_H)
    return batch_row.to(tl.int64) * seqlen + begin, token[:, None], length, head[None, :]


@triton.jit(do_not_specialize=["seqlen", "per_row"])
def log_gates(logits, forward, backward, table, seqlen, per_row, heads, stride, C: tl.constexpr):
    """forward and backward (tokens, heads) float32: the log-decay of a token is that of the token DELAY before it,
    backward that of the token OFFSET after it."""
    start, token, length, head = _gate_places(table, seqlen, per_row, heads, C)
    mask = (token < length) & (head < heads)
    at = (start + token) * heads + head
    source = token - C.DELAY
    there = mask & (source >= 0)
    x = tl.load(logits + (start + source) * stride + head, there, other=0.0).to(tl.float32)
    tl.store(forward + at, tl.where(there, log_sigmoid(x), 0.0), mask)
    source = token + C.OFFSET
    there = mask & (source < length)
    x = tl.load(logits + (start + source) * stride + head, there, other=0.0).to(tl.float32)
    tl.store(backward + at, tl.where(there, log_sigmoid(x), 0.0), mask)


@triton.jit(do_not_specialize=["seqlen", "per_row"])
def gate_gradients(dforward, dbackward, logits, dlogits, table, seqlen, per_row, heads, stride, C: tl.constexpr):
    """dlogits (tokens, heads)."""
    start, token, length, head = _gate_places(table, seqlen, per_row, heads, C)
    mask = (token < length) & (head < heads)
    target = token + C.DELAY
    gradient = tl.load(dforward + (start + target) * heads + head, mask & (target < length), other=0.0)
    target = token - C.OFFSET
    gradient += tl.load(dbackward + (start + target) * heads + head, mask & (target >= 0), other=0.0)
    x = tl.load(logits + (start + token) * stride + head, mask, other=0.0).to(tl.float32)
    gradient *= tl.sigmoid(-x)
    tl.store(dlogits + (start + token) * heads + head, gradient.to(dlogits.dtype.element_ty), mask)
