"""Triton kernels for what LION does with each vector: feature maps, and what the division by row sums asks for."""

from __future__ import annotations

import triton
import triton.language as tl


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
def _places(rows, vectors, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Numbers of vectors, of their tokens and in their tokens, columns, and which elements exist."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    token = row // vectors
    return row, token, row - token * vectors, column, (row < rows)[:, None] & (column < width)[None, :]


@triton.jit(do_not_specialize=["rows"])
def features(
    x, y, rows, vectors, width, scale, x_stride, FEATURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """y (tokens, vectors, width), the feature maps of x; the first half of a token's vectors, the queries, times
    `scale`."""
    row, token, vector, column, mask = _places(rows, vectors, width, ROWS, COLUMNS)
    at = token * x_stride + vector * width
    mapped = _feature(tl.load(x + at[:, None] + column[None, :], mask, other=0.0).to(tl.float32), mask, FEATURES)
    factor = tl.where(vector < vectors // 2, scale, 1.0)
    if FEATURES == "silu_norm":
        factor /= tl.sqrt(tl.where(row < rows, tl.sum(mapped * mapped, 1), 1.0))
    tl.store(y + row[:, None] * width + column[None, :], (mapped * factor[:, None]).to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def feature_gradients(
    dy, x, dx, rows, vectors, width, scale, dy_stride, x_stride, dx_stride,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx of `features`. dy (tokens, 2, vectors, width) has a gradient from each direction."""
    row, token, vector, column, mask = _places(rows, vectors, width, ROWS, COLUMNS)
    at = (token * dy_stride + vector * width)[:, None] + column[None, :]
    gradient = tl.load(dy + at, mask, other=0.0).to(tl.float32)
    gradient += tl.load(dy + at + vectors * width, mask, other=0.0).to(tl.float32)
    gradient *= tl.where(vector < vectors // 2, scale, 1.0)[:, None]
    given = tl.load(x + (token * x_stride + vector * width)[:, None] + column[None, :], mask, other=0.0).to(tl.float32)
    if FEATURES == "silu_norm":
        mapped = _feature(given, mask, FEATURES)
        factor = 1.0 / tl.sqrt(tl.where(row < rows, tl.sum(mapped * mapped, 1), 1.0))
        normed = mapped * factor[:, None]
        gradient = (gradient - normed * tl.sum(gradient * normed, 1)[:, None]) * factor[:, None]
    if FEATURES == "elu":
        gradient *= tl.exp(tl.where(given > 0.0, 0.0, given))
    else:
        sigmoid = tl.sigmoid(given)
        gradient *= sigmoid * (1 + given * (1 - sigmoid))
    at = (token * dx_stride + vector * width)[:, None] + column[None, :]
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def row_gradients(
    dy, dsums, y, rest, row_sum, dn, drow_sum, rows, vectors, width, eps, dy_stride,
    SUMS: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes for y = n / (row_sum + eps) dn = dy / (row_sum + eps), as it is rounded, and drow_sum = -dn . y +
    `dsums`, the gradient of the sums themselves."""
    row, token, vector, column, mask = _places(rows, vectors, width, ROWS, COLUMNS)
    at = row[:, None] * width + column[None, :]
    divisor = tl.load(row_sum + row, row < rows, other=1.0) + tl.where(row < rows, eps, 0.0)
    given = tl.load(dy + (token * dy_stride + vector * width)[:, None] + column[None, :], mask, other=0.0)
    divided = (given.to(tl.float32) / divisor[:, None]).to(dn.dtype.element_ty)
    tl.store(dn + at, divided, mask)
    out = tl.load(y + at, mask, other=0.0).to(tl.float32)
    if REST:
        out += tl.load(rest + at, mask, other=0.0).to(tl.float32)
    total = -tl.sum(divided.to(tl.float32) * out, 1)
    if SUMS:
        total += tl.load(dsums + row, row < rows, other=0.0).to(tl.float32)
    tl.store(drow_sum + row, total, row < rows)
