"""Short depthwise convolution in Triton, forward and backward.

Tokens of all batch rows are numbered through. A program computes a tile of rows by channels; each tap reads the
tile again, moved by some rows, which comes from the L1 cache after the first time. Rows outside the token's
document are masked where they are read, so that nothing, not even a NaN, passes from one document to another.

Backward: `_weight_gradients` computes the pre-activation again, writes its gradient g and sums g times x for
every tap over the rows that a program walks along; PyTorch adds the programs' sums in a fixed order. The
gradient of x is g convolved with the taps in reverse, by the kernel of the forward pass. Without activation g is
dy itself. Nothing is added atomically: the same inputs give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.documents import document_ids
from matmix.kernels.launching import ForcedConfiguration, launch, rows_in_place


class ConvConfig(NamedTuple):
    """Tile sizes and launch options."""

    channels: int
    """Channels of a tile."""
    rows: int
    """Rows of a tile of the convolution."""
    walk_rows: int
    """Rows of a tile of the weight gradients, which keep one fp32 tile per tap in registers."""
    num_warps: int
    num_stages: int


_WIDE = ConvConfig(channels=128, rows=32, walk_rows=8, num_warps=8, num_stages=2)
_WIDE_FP32 = ConvConfig(channels=64, rows=32, walk_rows=8, num_warps=4, num_stages=2)
_FEW_TOKENS = ConvConfig(channels=64, rows=16, walk_rows=8, num_warps=4, num_stages=2)
_NARROW = ConvConfig(channels=32, rows=64, walk_rows=16, num_warps=4, num_stages=2)

force_configuration = ForcedConfiguration()


def configurations() -> tuple[ConvConfig, ...]:
    """All configurations that `choose_config` can return."""
    return _WIDE, _WIDE_FP32, _FEW_TOKENS, _NARROW


def choose_config(batch: int, seqlen: int, d: int, dtype: torch.dtype) -> ConvConfig:
    """From shapes and dtype alone, never by timing: another tile rounds differently, and runs must repeat."""
    if force_configuration.value is not None:
        return force_configuration.value
    if d <= 32:
        return _NARROW
    if batch * seqlen * d < 1 << 20:  # fewer tiles of the wide kind than a large GPU can run at once
        return _FEW_TOKENS
    return _WIDE_FP32 if dtype == torch.float32 else _WIDE


@triton.jit
def _document(row, starts, ends, rows, seqlen, PACKED: tl.constexpr):
    """First row of each row's document and first row after it; an empty range beyond the last row."""
    if PACKED:
        start = tl.load(starts + row, row < rows, other=0).to(tl.int32)
        end = tl.load(ends + row, row < rows, other=0).to(tl.int32)
    else:
        start = row // seqlen * seqlen
        end = tl.where(row < rows, start + seqlen, 0)
    return start, end


@triton.jit
def _offset(row, seqlen, batch_stride, row_stride):
    """Offset of numbered-through rows in a (batch, seqlen, d) tensor."""
    at = row // seqlen
    return at.to(tl.int64) * batch_stride + (row - at * seqlen).to(tl.int64) * row_stride


@triton.jit
def _load_moved(x, offset, row, move, start, end, row_stride, channel, d):
    """Rows `row + move` where they are of the row's own document, zero elsewhere."""
    source = row + move
    inside = (source >= start) & (source < end)
    at = x + (offset + move * row_stride)[:, None] + channel[None, :]
    return tl.load(at, inside[:, None] & (channel < d)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows", "seqlen"])
def _convolve(
    x, taps, bias, y, starts, ends,
    rows, seqlen, d, batch_stride, row_stride,
    WIDTH: tl.constexpr, LEFT: tl.constexpr, REVERSE: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y_t = activation(bias + sum over taps j of taps[j] x_{t + j - LEFT}); REVERSE reads taps backwards."""
    # Neighbouring programs take neighbouring channels of the same rows: whole rows are read at about one time.
    blocks = tl.cdiv(d, CHANNELS)
    tile = tl.program_id(0) // blocks
    channel = (tl.program_id(0) - tile * blocks) * CHANNELS + tl.arange(0, CHANNELS)
    row = tile * ROWS + tl.arange(0, ROWS)
    start, end = _document(row, starts, ends, rows, seqlen, PACKED)
    offset = _offset(row, seqlen, batch_stride, row_stride)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    if BIAS:
        total += tl.load(bias + channel, channel < d, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        column = WIDTH - 1 - tap if REVERSE else tap
        weights = tl.load(taps + column * d + channel, channel < d, other=0.0).to(tl.float32)
        moved = _load_moved(x, offset, row, tap - LEFT, start, end, row_stride, channel, d)
        total += weights[None, :] * moved.to(tl.float32)
    if SILU:
        total = total * tl.sigmoid(total)
    at = y + row.to(tl.int64)[:, None] * d + channel[None, :]
    tl.store(at, total.to(y.dtype.element_ty), (row < rows)[:, None] & (channel < d)[None, :])


@triton.jit(do_not_specialize=["rows", "seqlen", "walk"])
def _weight_gradients(
    dy, x, taps, bias, g, sums, starts, ends,
    rows, seqlen, walk, d, dy_batch_stride, dy_row_stride, batch_stride, row_stride,
    WIDTH: tl.constexpr, LEFT: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Over `walk` tiles of rows: g = dy silu'(pre-activation), and the sums of g x per tap, then of g."""
    blocks = tl.cdiv(d, CHANNELS)
    program = tl.program_id(0) // blocks
    channel = (tl.program_id(0) - program * blocks) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < d
    # One sum per element of the tile: rows are added up once at the end, not in every step.
    found = ()
    for _ in tl.static_range(WIDTH + BIAS):
        found += (tl.zeros((ROWS, CHANNELS), tl.float32),)
    for step in range(walk):
        row = (program * walk + step) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & there[None, :]
        start, end = _document(row, starts, ends, rows, seqlen, PACKED)
        offset = _offset(row, seqlen, batch_stride, row_stride)
        dy_offset = _offset(row, seqlen, dy_batch_stride, dy_row_stride)
        gradient = tl.load(dy + dy_offset[:, None] + channel[None, :], mask, other=0.0).to(tl.float32)
        moved = ()
        for tap in tl.static_range(WIDTH):
            moved += (_load_moved(x, offset, row, tap - LEFT, start, end, row_stride, channel, d),)
        if SILU:
            total = tl.zeros((ROWS, CHANNELS), tl.float32)
            if BIAS:
                total += tl.load(bias + channel, there, other=0.0).to(tl.float32)[None, :]
            for tap in tl.static_range(WIDTH):
                weights = tl.load(taps + tap * d + channel, there, other=0.0).to(tl.float32)
                total += weights[None, :] * moved[tap].to(tl.float32)
            sigmoid = tl.sigmoid(total)
            gradient *= sigmoid * (1 + total * (1 - sigmoid))
            at = g + row.to(tl.int64)[:, None] * d + channel[None, :]
            tl.store(at, gradient.to(g.dtype.element_ty), mask)
        more = ()
        for tap in tl.static_range(WIDTH):
            more += (found[tap] + gradient * moved[tap].to(tl.float32),)
        if BIAS:
            more += (found[WIDTH] + gradient,)
        found = more
    for index in tl.static_range(WIDTH + BIAS):
        at = sums + (program * (WIDTH + BIAS) + index).to(tl.int64) * d + channel
        tl.store(at, tl.sum(found[index], 0), there)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    causal: bool,
    activation: str | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Shapes and dtypes as in `short_conv`: (batch, seqlen, d) typed like x, contiguous."""
    width = weight.shape[1]
    left = width - 1 if causal else width // 2
    taps = weight.t().contiguous()
    return _run_convolution(x, taps, bias, left, False, activation == "silu", _bounds(cu_seqlens, x.shape[1]))


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    causal: bool,
    activation: str | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, weight and bias, each typed like its input."""
    batch, seqlen, d = x.shape
    width = weight.shape[1]
    left = width - 1 if causal else width // 2
    silu = activation == "silu"
    bounds = _bounds(cu_seqlens, seqlen)
    config = choose_config(batch, seqlen, d, x.dtype)

    # One tap's weights of all channels side by side, as the channels of a tile are.
    dy, x, taps = rows_in_place(dy), rows_in_place(x), weight.t().contiguous()
    g = torch.empty_like(x, memory_format=torch.contiguous_format) if silu else dy
    blocks = triton.cdiv(d, config.channels)
    tiles = triton.cdiv(batch * seqlen, config.walk_rows)
    # At least 64 rows a program, so that its sums are few beside what it reads; and no more than about 4096
    # programs, which fill any GPU: their sums then take a few megabytes however many tokens there are.
    walk = max(64 // config.walk_rows, triton.cdiv(tiles, max(1, 4096 // blocks)))
    programs = triton.cdiv(tiles, walk)
    sums = torch.empty(programs, width + (bias is not None), d, dtype=torch.float32, device=x.device)
    launch(
        _weight_gradients,
        (programs * blocks,),
        *(dy, x, taps, None if bias is None else bias.contiguous(), g, sums, *bounds),
        *(batch * seqlen, seqlen, walk, d, dy.stride(0), dy.stride(1), x.stride(0), x.stride(1)),
        WIDTH=width,
        LEFT=left,
        SILU=silu,
        BIAS=bias is not None,
        PACKED=cu_seqlens is not None,
        ROWS=config.walk_rows,
        CHANNELS=config.channels,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    total = sums.sum(0)
    dx = _run_convolution(g, taps, None, width - 1 - left, True, False, bounds)
    dweight = total[:width].t().to(weight.dtype, memory_format=torch.contiguous_format).contiguous()
    return dx, dweight, None if bias is None else total[width].to(bias.dtype).clone()


def _run_convolution(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    left: int,
    reverse: bool,
    silu: bool,
    bounds: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    batch, seqlen, d = x.shape
    config = choose_config(batch, seqlen, d, x.dtype)
    x = rows_in_place(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(
        _convolve,
        (triton.cdiv(batch * seqlen, config.rows) * triton.cdiv(d, config.channels),),
        *(x, taps, None if bias is None else bias.contiguous(), y, *bounds),
        *(batch * seqlen, seqlen, d, x.stride(0), x.stride(1)),
        WIDTH=taps.shape[0],
        LEFT=left,
        REVERSE=reverse,
        SILU=silu,
        BIAS=bias is not None,
        PACKED=bounds[0] is not None,
        ROWS=config.rows,
        CHANNELS=config.channels,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y


def _bounds(cu_seqlens: Tensor | None, seqlen: int) -> tuple[Tensor | None, Tensor | None]:
    """Where each token's document starts and where it ends, (seqlen,) each, without waiting for the device."""
    if cu_seqlens is None:
        return None, None
    ids = document_ids(cu_seqlens, seqlen)
    return cu_seqlens[:-1].index_select(0, ids), cu_seqlens[1:].index_select(0, ids)
