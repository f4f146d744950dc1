"""Triton kernels for what a layer has of each token and head (step sizes, decays, the diagonal, and their gradients),
and for the gradients of its small parameters.

A program takes some tokens and a block of columns; a column is a head of one direction. All of it is float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.launching import launch
from matmix.kernels.scan_layer.chunked import LayerInputs
from matmix.kernels.slots import log_one_plus

SUMMED_COLUMNS = 32
SUMMED_PROGRAMS = 64
"""Sums of programs that `add_programs` adds side by side."""


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
    raw, dt_bias, A_log, product, D, dt, log_decay, diagonal, rows, heads, columns, low, high, raw_stride,
    product_stride, C: tl.constexpr,
):  # fmt: skip
    """dt = softplus(raw + dt_bias) within its limits and log_decay = -dt exp(A_log), both (rows, columns); with
    DIAGONAL also product + D (rows, heads)."""
    row = (tl.program_id(0) * C.ROWS + tl.arange(0, C.ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * C.COLUMNS + tl.arange(0, C.COLUMNS)
    there = column < columns
    mask = (row < rows) & there[None, :]
    x = tl.load(raw + row * raw_stride + column[None, :], mask, other=0.0).to(tl.float32)
    x += _parameter(dt_bias, column, heads, there, C.SHARED)
    step = _limited(_softplus(x), low, high, C.LIMITED)
    at = row * columns + column[None, :]
    tl.store(dt + at, step, mask)
    tl.store(log_decay + at, -step * tl.exp(_parameter(A_log, column, heads, there, C.SHARED)), mask)
    if C.DIAGONAL:
        own = column < heads
        mask = (row < rows) & own[None, :]
        total = tl.load(product + row * product_stride + column[None, :], mask, other=0.0).to(tl.float32)
        total += tl.load(D + column, own, other=0.0).to(tl.float32)[None, :]
        tl.store(diagonal + row * heads + column[None, :], total, mask)


@triton.jit
def _of_directions(first, second, row, column, heads, mask, TWO: tl.constexpr):
    """A tile of the numbers (rows, heads) of both directions side by side."""
    at = row * heads + column[None, :]
    both = tl.load(first + at, mask & (column < heads)[None, :], other=0.0)
    if TWO:
        both += tl.load(second + at - heads, mask & (column >= heads)[None, :], other=0.0)
    return both


@triton.jit(do_not_specialize=["rows", "walk"])
def step_gradients(
    ddt1, ddt2, ddecay1, ddecay2, ddiagonal, raw, dt_bias, A_log, draw, dproduct, sums, rows, walk, heads, columns, low,
    high, raw_stride, draw_stride, C: tl.constexpr,
):  # fmt: skip
    """Computes, over `walk` tiles of rows, the gradients of raw step sizes and of the product, and sums (3, columns)
    for those of dt_bias, A_log and D."""
    column = tl.program_id(1) * C.COLUMNS + tl.arange(0, C.COLUMNS)
    there = column < columns
    own = column < heads
    A = -tl.exp(_parameter(A_log, column, heads, there, C.SHARED))
    bias = _parameter(dt_bias, column, heads, there, C.SHARED)
    dbias = tl.zeros((C.ROWS, C.COLUMNS), tl.float32)
    dA = tl.zeros((C.ROWS, C.COLUMNS), tl.float32)
    dD = tl.zeros((C.ROWS, C.COLUMNS), tl.float32)
    for step in range(walk):
        row = ((tl.program_id(0) * walk + step) * C.ROWS + tl.arange(0, C.ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & there[None, :]
        x = tl.load(raw + row * raw_stride + column[None, :], mask, other=0.0).to(tl.float32) + bias
        free = _softplus(x)
        ddecay = _of_directions(ddecay1, ddecay2, row, column, heads, mask, C.TWO)
        ddt = _of_directions(ddt1, ddt2, row, column, heads, mask, C.TWO)
        gradient = (ddt + ddecay * A) * tl.sigmoid(x)
        if C.LIMITED:
            gradient = tl.where((free < low) | (free > high), 0.0, gradient)
        dbias += gradient
        dA += ddecay * _limited(free, low, high, C.LIMITED) * A
        tl.store(draw + row * draw_stride + column[None, :], gradient.to(draw.dtype.element_ty), mask)
        if C.DIAGONAL:
            mask = (row < rows) & own[None, :]
            gradient_there = tl.load(ddiagonal + row * heads + column[None, :], mask, other=0.0)
            dD += gradient_there
            tl.store(dproduct + row * heads + column[None, :], gradient_there.to(dproduct.dtype.element_ty), mask)
    at = sums + tl.program_id(0).to(tl.int64) * (3 * columns) + column
    tl.store(at, tl.sum(dbias, 0), there)
    tl.store(at + columns, tl.sum(dA, 0), there)
    tl.store(at + 2 * columns, tl.sum(dD, 0), there)


@triton.jit
def clear_edges(first, second, cu_seqlens, seqlen, batch_stride, row_stride, width, C: tl.constexpr):
    """With shift nobody reads with the q of a document's last token forward and of its first token backward: zeros the
    gradients of these two rows."""
    document = tl.program_id(0)
    if C.PACKED:
        begin = tl.load(cu_seqlens + document).to(tl.int64)
        end = tl.load(cu_seqlens + document + 1).to(tl.int64)
    else:
        begin = document.to(tl.int64) * 0
        end = begin + seqlen
        first += document.to(tl.int64) * batch_stride
        second += document.to(tl.int64) * batch_stride
    column = tl.program_id(1) * C.BLOCK + tl.arange(0, C.BLOCK)
    mask = (column < width) & (begin < end)
    zero = tl.zeros((C.BLOCK,), first.dtype.element_ty)
    tl.store(first + (end - 1) * row_stride + column, zero, mask)
    tl.store(second + begin * row_stride + column, zero, mask)


@triton.jit
def _total(sums, programs, width, column, there, C: tl.constexpr):
    """The sum over programs of columns of sums (programs, width)."""
    partial = tl.zeros((C.PROGRAMS, C.COLUMNS), tl.float32)
    for first in range(0, programs, C.PROGRAMS):
        program = first + tl.arange(0, C.PROGRAMS)
        mask = (program < programs)[:, None] & there[None, :]
        partial += tl.load(sums + program.to(tl.int64)[:, None] * width + column[None, :], mask, other=0.0)
    return tl.sum(partial, 0)


@triton.jit(do_not_specialize=["norm_programs", "conv_programs", "step_programs"])
def add_programs(
    norm_sums, dnorm, conv_sums, dweight, dconv_bias, step_sums, dt_bias, dA_log, dD, norm_programs, inner,
    conv_programs, channels, step_programs, heads, C: tl.constexpr,
):  # fmt: skip
    """Adds the sums that the programs of the norm's, the convolution's and the steps' kernels have left, in a fixed
    order. Programs number the columns of the norm first, then those of the convolution, a row for each tap and one for
    the bias, then those of dt_bias, A_log and D."""
    block = tl.program_id(0)
    norm_blocks = tl.cdiv(inner, C.COLUMNS)
    conv_blocks = tl.cdiv(channels, C.COLUMNS)
    if block < norm_blocks:
        column = block * C.COLUMNS + tl.arange(0, C.COLUMNS)
        total = _total(norm_sums, norm_programs, inner, column, column < inner, C)
        tl.store(dnorm + column, total.to(dnorm.dtype.element_ty), column < inner)
    elif block < norm_blocks + conv_blocks * (C.WIDTH + C.BIAS):
        tap = (block - norm_blocks) // conv_blocks
        channel = (block - norm_blocks - tap * conv_blocks) * C.COLUMNS + tl.arange(0, C.COLUMNS)
        there = channel < channels
        width = channels * (C.WIDTH + C.BIAS)
        total = _total(conv_sums, conv_programs, width, tap * channels + channel, there, C)
        if tap < C.WIDTH:
            tl.store(dweight + channel * C.WIDTH + tap, total.to(dweight.dtype.element_ty), there)
        else:
            if C.BIAS:
                tl.store(dconv_bias + channel, total.to(dconv_bias.dtype.element_ty), there)
    else:
        columns = C.DIRECTIONS * heads
        blocks = tl.cdiv(columns, C.COLUMNS)
        rest = block - norm_blocks - conv_blocks * (C.WIDTH + C.BIAS)
        kind = rest // blocks
        column = (rest - kind * blocks) * C.COLUMNS + tl.arange(0, C.COLUMNS)
        width = 3 * columns
        there = column < (heads if C.SHARED else tl.where(kind == 2, heads, columns))
        total = _total(step_sums, step_programs, width, kind * columns + column, there, C)
        if C.SHARED and C.DIRECTIONS == 2 and kind < 2:
            at = kind * columns + heads + column
            total += _total(step_sums, step_programs, width, at, there, C)
        if kind == 0:
            tl.store(dt_bias + column, total.to(dt_bias.dtype.element_ty), there)
        elif kind == 1:
            tl.store(dA_log + column, total.to(dA_log.dtype.element_ty), there)
        else:
            if C.DIAGONAL:
                tl.store(dD + column, total.to(dD.dtype.element_ty), there)


def parameter_gradients(
    norm_sums: Tensor, conv_sums: Tensor, step_sums: Tensor, given: LayerInputs
) -> list[Tensor | None]:
    """The gradients of norm_weight, conv_weight, conv_bias, dt_bias, A_log and, with `diagonal_weight`, D, each like
    its parameter and contiguous, from sums over tokens (programs, inner), (programs, taps and bias, channels) and
    (programs, 3, directions nheads)."""
    D = None if given.diagonal_weight is None else given.D
    parameters = (given.norm_weight, given.conv_weight, given.conv_bias, given.dt_bias, given.A_log, D)
    gradients = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in parameters]
    dnorm, dweight, dconv_bias, ddt_bias, dA_log, dD = gradients
    inner, (channels, width) = norm_sums.shape[1], given.conv_weight.shape
    columns, directions = step_sums.shape[2], given.directions
    blocks = [triton.cdiv(n, SUMMED_COLUMNS) for n in (inner, channels, columns)]
    bias, diagonal = given.conv_bias is not None, D is not None
    programs = blocks[0] + blocks[1] * (width + bias) + blocks[2] * (2 + diagonal)
    launch(
        add_programs, (programs,),
        norm_sums, dnorm, conv_sums, dweight, dconv_bias, step_sums, ddt_bias, dA_log, dD,
        norm_sums.shape[0], inner, conv_sums.shape[0], channels, step_sums.shape[0], columns // directions,
        DIRECTIONS=directions, SHARED=given.dt_bias.numel() < columns or directions == 1, DIAGONAL=diagonal,
        WIDTH=width, BIAS=bias, PROGRAMS=SUMMED_PROGRAMS, COLUMNS=SUMMED_COLUMNS, num_warps=4, num_stages=1,
    )  # fmt: skip
    return gradients
