"""Triton kernels for what a layer has of each token and head: step sizes, decays, the diagonal, and their gradients.

A program takes some tokens and a block of columns; a column is a head of one direction. All of it is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.elementwise import log_one_plus


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), with all digits where it is small."""
    return tl.where(x > 20.0, x, log_one_plus(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _parameter(x, column, heads, there, SHARED: tl.constexpr):
    """A parameter of each column: (heads,) if it is SHARED by the directions, else (directions, heads)."""
    return tl.load(x + (column % heads if SHARED else column), there, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _limited(free, low, high, LIMITED: tl.constexpr):
    if LIMITED:
        # Comparisons, not minimum and maximum: those would swallow a NaN.
        free = tl.where(free < low, low, free)
        free = tl.where(free > high, high, free)
    return free


@triton.jit(do_not_specialize=["rows"])
def step_sizes(
    raw, dt_bias, A_log, product, D, dt, log_decay, diagonal,
    rows, heads, columns, low, high, raw_stride, product_stride,
    SHARED: tl.constexpr, LIMITED: tl.constexpr, DIAGONAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dt = softplus(raw + dt_bias) within its limits and log_decay = -dt exp(A_log), both (rows, columns); with
    DIAGONAL also product + D (rows, heads)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    mask = (row < rows) & there[None, :]
    x = tl.load(raw + row * raw_stride + column[None, :], mask, other=0.0).to(tl.float32)
    x += _parameter(dt_bias, column, heads, there, SHARED)
    step = _limited(_softplus(x), low, high, LIMITED)
    at = row * columns + column[None, :]
    tl.store(dt + at, step, mask)
    tl.store(log_decay + at, -step * tl.exp(_parameter(A_log, column, heads, there, SHARED)), mask)
    if DIAGONAL:
        own = column < heads
        mask = (row < rows) & own[None, :]
        found = tl.load(product + row * product_stride + column[None, :], mask, other=0.0).to(tl.float32)
        found += tl.load(D + column, own, other=0.0).to(tl.float32)[None, :]
        tl.store(diagonal + row * heads + column[None, :], found, mask)


@triton.jit
def _of_directions(first, second, row, column, heads, mask, TWO: tl.constexpr):
    """A tile of the numbers (rows, heads) of both directions side by side."""
    at = row * heads + column[None, :]
    found = tl.load(first + at, mask & (column < heads)[None, :], other=0.0)
    if TWO:
        found += tl.load(second + at - heads, mask & (column >= heads)[None, :], other=0.0)
    return found


@triton.jit(do_not_specialize=["rows", "walk"])
def step_gradients(
    ddt1, ddt2, ddecay1, ddecay2, ddiagonal, raw, dt_bias, A_log, draw, dproduct, sums,
    rows, walk, heads, columns, low, high, raw_stride, draw_stride,
    TWO: tl.constexpr, SHARED: tl.constexpr, LIMITED: tl.constexpr, DIAGONAL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Over `walk` tiles of rows: the gradients of raw step sizes and of the product, and sums over rows (3, columns)
    for those of dt_bias, A_log and D."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    own = column < heads
    A = -tl.exp(_parameter(A_log, column, heads, there, SHARED))
    bias = _parameter(dt_bias, column, heads, there, SHARED)
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    dA = tl.zeros((ROWS, COLUMNS), tl.float32)
    dD = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(walk):
        row = ((tl.program_id(0) * walk + step) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & there[None, :]
        x = tl.load(raw + row * raw_stride + column[None, :], mask, other=0.0).to(tl.float32) + bias
        free = _softplus(x)
        ddecay = _of_directions(ddecay1, ddecay2, row, column, heads, mask, TWO)
        ddt = _of_directions(ddt1, ddt2, row, column, heads, mask, TWO)
        gradient = (ddt + ddecay * A) * tl.sigmoid(x)
        if LIMITED:
            gradient = tl.where((free < low) | (free > high), 0.0, gradient)
        dbias += gradient
        dA += ddecay * _limited(free, low, high, LIMITED) * A
        tl.store(draw + row * draw_stride + column[None, :], gradient.to(draw.dtype.element_ty), mask)
        if DIAGONAL:
            mask = (row < rows) & own[None, :]
            found = tl.load(ddiagonal + row * heads + column[None, :], mask, other=0.0)
            dD += found
            tl.store(dproduct + row * heads + column[None, :], found.to(dproduct.dtype.element_ty), mask)
    at = sums + tl.program_id(0).to(tl.int64) * (3 * columns) + column
    tl.store(at, tl.sum(dbias, 0), there)
    tl.store(at + columns, tl.sum(dA, 0), there)
    tl.store(at + 2 * columns, tl.sum(dD, 0), there)


@triton.jit
def clear_edges(
    first, second, cu_seqlens, seqlen, batch_stride, row_stride, width, PACKED: tl.constexpr, BLOCK: tl.constexpr
):
    """With shift nobody reads with the q of a document's last token forward and of its first token backward: zeros the
    gradients of these two rows."""
    document = tl.program_id(0)
    if PACKED:
        begin = tl.load(cu_seqlens + document).to(tl.int64)
        end = tl.load(cu_seqlens + document + 1).to(tl.int64)
    else:
        begin = document.to(tl.int64) * 0
        end = begin + seqlen
        first += document.to(tl.int64) * batch_stride
        second += document.to(tl.int64) * batch_stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (column < width) & (begin < end)
    zero = tl.zeros((BLOCK,), first.dtype.element_ty)
    tl.store(first + (end - 1) * row_stride + column, zero, mask)
    tl.store(second + begin * row_stride + column, zero, mask)
