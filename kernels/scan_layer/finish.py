"""The last step of the gradients of a layer's small parameters: one launch adds the sums that the programs of the
norm's, the convolution's and the steps' kernels have left, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.launching import launch

COLUMNS = 32
PROGRAMS = 64
"""Sums of programs that are added side by side."""


@triton.jit
def _total(sums, programs, width, column, there, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum over programs of columns of sums (programs, width)."""
    found = tl.zeros((PROGRAMS, COLUMNS), tl.float32)
    for first in range(0, programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)
        mask = (program < programs)[:, None] & there[None, :]
        found += tl.load(sums + program.to(tl.int64)[:, None] * width + column[None, :], mask, other=0.0)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["norm_programs", "conv_programs", "step_programs"])
def add_programs(
    norm_sums, dnorm, conv_sums, dweight, dconv_bias, step_sums, dt_bias, dA_log, dD,
    norm_programs, inner, conv_programs, channels, step_programs, heads,
    DIRECTIONS: tl.constexpr, SHARED: tl.constexpr, DIAGONAL: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Programs number the columns of the norm first, then those of the convolution, a row for each tap and one for the
    bias, then those of dt_bias, A_log and D."""
    block = tl.program_id(0)
    norm_blocks = tl.cdiv(inner, COLUMNS)
    conv_blocks = tl.cdiv(channels, COLUMNS)
    if block < norm_blocks:
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        total = _total(norm_sums, norm_programs, inner, column, column < inner, PROGRAMS, COLUMNS)
        tl.store(dnorm + column, total.to(dnorm.dtype.element_ty), column < inner)
    elif block < norm_blocks + conv_blocks * (WIDTH + BIAS):
        tap = (block - norm_blocks) // conv_blocks
        channel = (block - norm_blocks - tap * conv_blocks) * COLUMNS + tl.arange(0, COLUMNS)
        there = channel < channels
        width = channels * (WIDTH + BIAS)
        total = _total(conv_sums, conv_programs, width, tap * channels + channel, there, PROGRAMS, COLUMNS)
        if tap < WIDTH:
            tl.store(dweight + channel * WIDTH + tap, total.to(dweight.dtype.element_ty), there)
        else:
            if BIAS:
                tl.store(dconv_bias + channel, total.to(dconv_bias.dtype.element_ty), there)
    else:
        columns = DIRECTIONS * heads
        blocks = tl.cdiv(columns, COLUMNS)
        rest = block - norm_blocks - conv_blocks * (WIDTH + BIAS)
        kind = rest // blocks
        column = (rest - kind * blocks) * COLUMNS + tl.arange(0, COLUMNS)
        width = 3 * columns
        there = column < (heads if SHARED else tl.where(kind == 2, heads, columns))
        total = _total(step_sums, step_programs, width, kind * columns + column, there, PROGRAMS, COLUMNS)
        if SHARED and DIRECTIONS == 2 and kind < 2:
            at = kind * columns + heads + column
            total += _total(step_sums, step_programs, width, at, there, PROGRAMS, COLUMNS)
        if kind == 0:
            tl.store(dt_bias + column, total.to(dt_bias.dtype.element_ty), there)
        elif kind == 1:
            tl.store(dA_log + column, total.to(dA_log.dtype.element_ty), there)
        else:
            if DIAGONAL:
                tl.store(dD + column, total.to(dD.dtype.element_ty), there)


def parameter_gradients(
    norm_sums: Tensor,
    conv_sums: Tensor,
    step_sums: Tensor,
    directions: int,
    norm_weight: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """The gradients of the last six from sums over tokens (programs, inner), (programs, taps and bias, channels) and
    (programs, 3, directions nheads), each shaped and typed like its parameter and contiguous."""
    parameters = (norm_weight, conv_weight, conv_bias, dt_bias, A_log, D)
    found = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in parameters]
    dnorm, dweight, dconv_bias, ddt_bias, dA_log, dD = found
    inner, (channels, width) = norm_sums.shape[1], conv_weight.shape
    columns = step_sums.shape[2]
    blocks = [triton.cdiv(n, COLUMNS) for n in (inner, channels, columns)]
    bias, diagonal = conv_bias is not None, D is not None
    programs = blocks[0] + blocks[1] * (width + bias) + blocks[2] * (2 + diagonal)
    launch(
        add_programs, (programs,),
        norm_sums, dnorm, conv_sums, dweight, dconv_bias, step_sums, ddt_bias, dA_log, dD,
        norm_sums.shape[0], inner, conv_sums.shape[0], channels, step_sums.shape[0], columns // directions,
        DIRECTIONS=directions, SHARED=dt_bias.numel() < columns or directions == 1, DIAGONAL=diagonal, WIDTH=width,
        BIAS=bias, PROGRAMS=PROGRAMS, COLUMNS=COLUMNS, num_warps=4, num_stages=1,
    )  # fmt: skip
    return tuple(found)
