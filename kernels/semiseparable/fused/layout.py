"""Functions that all scan kernels share: reading tiles, and the decays inside a chunk.

Exponents are sums of log-decays in units of log 2, added in float64 and, for float32 inputs, split into two
float32 numbers: a difference of two long sums of strong decays, rounded once, would lose the weak decays between
them. (For half precision the rounding of those sums is far below that of the inputs.)
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-151.0)
"""2 to this power is 0 in float32; a bound keeps sums finite when a decay of exactly 0 (log -inf) is given."""
HIGHEST = tl.constexpr(0.01 * 1.4426950408889634)
"""LARGEST_LOG_DECAY of matmix.kernels.checks: values on the device cannot be refused without waiting for it."""
BEYOND = tl.constexpr(4.0)
"""More than any exponent inside a triangle can be (HIGHEST times the longest chunk)."""


@triton.jit
def log_decays(gate, stride, index, valid, GATED: tl.constexpr):
    """log2 of the decays of the tokens at `index`, float64; 0 where there is no token or no gate."""
    if GATED:
        a = tl.load(gate + index * stride, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        # Comparisons, not minimum and maximum: those would swallow a NaN.
        a = tl.where(a < LOWEST, LOWEST, a)
        a = tl.where(a > HIGHEST, HIGHEST, a)
    else:
        a = tl.zeros_like(index).to(tl.float32)
    return a.to(tl.float64)


@triton.jit
def two_floats(x):
    """float64 as the sum of two float32."""
    high = x.to(tl.float32)
    return high, (x - high.to(tl.float64)).to(tl.float32)


@triton.jit
def decay_matrix(row_high, row_low, col_high, col_low, EXACT: tl.constexpr):
    """2 to the power of row + column, where that is below 1 or a little above: elsewhere, outside the triangle that
    counts, it may be anything finite. A NaN stays one."""
    exponents = row_high[:, None] + col_high[None, :]
    if EXACT:
        exponents += row_low[:, None] + col_low[None, :]
    return tl.exp2(tl.where(exponents > BEYOND, 0.0, exponents))


@triton.jit
def load_rows(x, stride, index, valid, first, width, BLOCK: tl.constexpr):
    """Rows `index` of a matrix, columns from `first` on, (rows, BLOCK): zero beyond `width` and where not `valid`."""
    column = first + tl.arange(0, BLOCK)
    return tl.load(
        x + index[:, None] * stride + column[None, :], mask=valid[:, None] & (column[None, :] < width), other=0.0
    )


@triton.jit
def load_factor(x, stride, index, valid):
    """A number per token in float32; 0 where there is no token."""
    return tl.load(x + index * stride, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def load_state(states, n0, d_state, p0, headdim, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    """A tile of the (d_state, headdim) state that `states` points to."""
    n = n0 + tl.arange(0, BLOCK_N)
    p = p0 + tl.arange(0, BLOCK_P)
    inside = (n[:, None] < d_state) & (p[None, :] < headdim)
    return tl.load(states + n[:, None] * headdim + p[None, :], mask=inside, other=0.0)


@triton.jit
def shifted(index, start, length, REVERSE: tl.constexpr, SHIFT: tl.constexpr):
    """Where the q that a token reads with stands (its neighbour's with SHIFT), and whether it exists."""
    source = index + ((1 if REVERSE else -1) if SHIFT else 0)
    return source, (start + index < length) & (start + source >= 0) & (start + source < length)


@triton.jit
def side_scores(
    rows, rows_l, cols, cols_l, from_i, inside_i, from_j, inside_j, d_state,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_N: tl.constexpr, N_BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scalar products of all rows with all columns, (ROWS, COLS) float32."""
    scores = tl.zeros((ROWS, COLS), tl.float32)
    for block in range(N_BLOCKS):
        x = load_rows(rows, rows_l, from_i, inside_i, block * BLOCK_N, d_state, BLOCK_N)
        c = load_rows(cols, cols_l, from_j, inside_j, block * BLOCK_N, d_state, BLOCK_N)
        scores = tl.dot(x, tl.trans(c), acc=scores, input_precision=PRECISION)
    return scores


@triton.jit
def state_dot(x, state, acc, PRECISION: tl.constexpr):
    """acc + x state, where the state may hold more than x's dtype can: float16 ends at 65,504, states do not."""
    if x.dtype == tl.float16:
        acc = tl.dot(x.to(tl.float32), state.to(tl.float32), acc=acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, state.to(x.dtype), acc=acc, input_precision=PRECISION)
    return acc
