"""Gated RMSNorm in Triton, forward and backward; only the inputs are stored for the backward pass.

A program holds a tile of rows by the channels of one group, padded to a power of two, so that one read serves the root
mean square and the result. Groups wider than a tile are cut: `_statistics` first reduces every row over the group's
tiles, then the same kernels as for narrow groups read its results. Backward walks along rows and sums the gradient of
the weight in registers; PyTorch adds the programs' sums in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.functions import Output
from matmix.kernels.gated_norm.chunked import NormInputs
from matmix.kernels.launching import ForcedConfiguration, launch, rows_in_place


class NormConfig(NamedTuple):
    """Tile sizes and launch options."""

    elements: int
    """Elements of a tile: it holds as many rows as fit, at least one."""
    columns: int
    """Channels of a tile at most; groups wider than that are cut."""
    programs: int
    """Programs of the backward pass at most, about; enough to fill any GPU, so few that their sums are small."""
    num_warps: int
    num_stages: int


_SMALL = NormConfig(elements=512, columns=512, programs=1024, num_warps=4, num_stages=2)
_MIDDLE = NormConfig(elements=2048, columns=2048, programs=1024, num_warps=4, num_stages=2)
_LARGE = NormConfig(elements=4096, columns=4096, programs=1024, num_warps=8, num_stages=2)
_CUT = NormConfig(elements=2048, columns=1024, programs=1024, num_warps=4, num_stages=2)

force_configuration = ForcedConfiguration()


def configurations() -> tuple[NormConfig, ...]:
    """All configurations that `choose_config` can return."""
    return _SMALL, _MIDDLE, _LARGE, _CUT


def choose_config(group: int) -> NormConfig:
    """Chooses from shapes alone, never by timing: another tile rounds differently, and runs must repeat."""
    if force_configuration.value is not None:
        return force_configuration.value
    return next((config for config in (_SMALL, _MIDDLE, _LARGE) if group <= config.columns), _CUT)


@triton.jit
def _load(x, row, column, stride, mask):
    """Tile of a (rows, d) tensor in fp32, zero where masked."""
    return tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask, other=0.0).to(tl.float32)


@triton.jit
def _reciprocal_root(squares, row, rows, group, eps):
    """1 / sqrt(mean square + eps) of each row; 1 beyond the last row, where eps = 0 would give infinity."""
    return tl.rsqrt(tl.where(row < rows, squares / group + eps, 1.0))


@triton.jit
def _to_norm(x, gate, NORM_FIRST: tl.constexpr):
    """Returns the input of the norm: x, or x times silu(gate) where the gate comes first."""
    if not NORM_FIRST:
        x = x * (gate * tl.sigmoid(gate))
    return x


@triton.jit
def _gated_gradients(dy, normed, gate, weight, NORM_FIRST: tl.constexpr):
    """Returns the gradient of a tile of normed rows, and the tile that the weight's gradient sums over rows."""
    if NORM_FIRST:
        dy = dy * gate * tl.sigmoid(gate)
    return dy * weight, dy * normed


@triton.jit(do_not_specialize=["rows"])
def _statistics(
    dy, x, weight, gate, scales, alongs, rows, group, groups, eps, dy_stride, x_stride, gate_stride, C: tl.constexpr
):
    """Stores for each row and group the reciprocal root mean square, and with GRADIENT the mean of dnormed times
    normed."""
    block = tl.program_id(0) // groups
    index = tl.program_id(0) - block * groups
    row = block * C.ROWS + tl.arange(0, C.ROWS)
    squares = tl.zeros((C.ROWS, C.COLUMNS), tl.float32)
    products = tl.zeros((C.ROWS, C.COLUMNS), tl.float32)
    for first in range(0, group, C.COLUMNS):
        within = first + tl.arange(0, C.COLUMNS)
        column = index * group + within
        mask = (row < rows)[:, None] & (within < group)[None, :]
        tile = _load(x, row, column, x_stride, mask)
        g = tile
        if C.GRADIENT or not C.NORM_FIRST:
            g = _load(gate, row, column, gate_stride, mask)
        tile = _to_norm(tile, g, C.NORM_FIRST)
        squares += tile * tile
        if C.GRADIENT:
            weights = tl.load(weight + column, within < group, other=0.0).to(tl.float32)[None, :]
            gradient = _load(dy, row, column, dy_stride, mask)
            dnormed, _ = _gated_gradients(gradient, tile, g, weights, C.NORM_FIRST)
            products += dnormed * tile
    scale = _reciprocal_root(tl.sum(squares, 1), row, rows, group, eps)
    at = row.to(tl.int64) * groups + index
    tl.store(scales + at, scale, row < rows)
    if C.GRADIENT:
        tl.store(alongs + at, tl.sum(products, 1) * scale / group, row < rows)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(x, weight, gate, y, scales, rows, group, groups, eps, x_stride, gate_stride, C: tl.constexpr):
    # Neighbouring programs take neighbouring channels of the same rows: whole rows are read at about one time.
    pieces = tl.cdiv(group, C.COLUMNS)
    block = tl.program_id(0) // (groups * pieces)
    piece = tl.program_id(0) - block * (groups * pieces)
    index = piece // pieces
    within = (piece - index * pieces) * C.COLUMNS + tl.arange(0, C.COLUMNS)
    column = index * group + within
    row = block * C.ROWS + tl.arange(0, C.ROWS)
    mask = (row < rows)[:, None] & (within < group)[None, :]
    tile = _load(x, row, column, x_stride, mask)
    if not C.NORM_FIRST:
        tile = _to_norm(tile, _load(gate, row, column, gate_stride, mask), C.NORM_FIRST)
    if C.CUT:
        scale = tl.load(scales + row.to(tl.int64) * groups + index, row < rows, other=0.0)
    else:
        scale = _reciprocal_root(tl.sum(tile * tile, 1), row, rows, group, eps)
    if C.NORM_FIRST:
        g = _load(gate, row, column, gate_stride, mask)
    weights = tl.load(weight + column, within < group, other=0.0).to(tl.float32)
    out = tile * scale[:, None] * weights[None, :]
    if C.NORM_FIRST:
        out = out * (g * tl.sigmoid(g))
    at = y + row.to(tl.int64)[:, None] * (group * groups) + column[None, :]
    tl.store(at, out.to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows", "walk"])
def _gradients(
    dy, x, weight, gate, dx, dgate, sums, scales, alongs, rows, walk, group, groups, eps, dy_stride, x_stride,
    gate_stride, dgate_stride, C: tl.constexpr,
):  # fmt: skip
    """Computes, over `walk` tiles of rows, dx, dgate, and the sum over rows that is the weight's gradient."""
    pieces = tl.cdiv(group, C.COLUMNS)
    program = tl.program_id(0) // (groups * pieces)
    piece = tl.program_id(0) - program * (groups * pieces)
    index = piece // pieces
    within = (piece - index * pieces) * C.COLUMNS + tl.arange(0, C.COLUMNS)
    column = index * group + within
    weights = tl.load(weight + column, within < group, other=0.0).to(tl.float32)[None, :]
    # One sum per element of the tile: rows are added up once at the end, not in every step.
    dweight = tl.zeros((C.ROWS, C.COLUMNS), tl.float32)
    for step in range(walk):
        row = (program * walk + step) * C.ROWS + tl.arange(0, C.ROWS)
        mask = (row < rows)[:, None] & (within < group)[None, :]
        given = _load(x, row, column, x_stride, mask)
        g = _load(gate, row, column, gate_stride, mask)
        gradient = _load(dy, row, column, dy_stride, mask)
        tile = _to_norm(given, g, C.NORM_FIRST)
        if C.CUT:
            place = row.to(tl.int64) * groups + index
            scale = tl.load(scales + place, row < rows, other=0.0)[:, None]
        else:
            scale = _reciprocal_root(tl.sum(tile * tile, 1), row, rows, group, eps)[:, None]
        normed = tile * scale
        dnormed, addend = _gated_gradients(gradient, normed, g, weights, C.NORM_FIRST)
        dweight += addend
        if C.CUT:
            along = tl.load(alongs + place, row < rows, other=0.0)[:, None]
        else:
            along = tl.sum(dnormed * normed, 1)[:, None] / group
        sigmoid = tl.sigmoid(g)
        dsilu = sigmoid * (1 + g * (1 - sigmoid))
        dtile = (dnormed - normed * along) * scale
        if C.NORM_FIRST:
            dgated = gradient * normed * weights * dsilu
        else:
            dgated = dtile * given * dsilu
            dtile = dtile * (g * sigmoid)
        at = row.to(tl.int64)[:, None] * (group * groups) + column[None, :]
        tl.store(dx + at, dtile.to(dx.dtype.element_ty), mask)
        at = row.to(tl.int64)[:, None] * dgate_stride + column[None, :]
        tl.store(dgate + at, dgated.to(dgate.dtype.element_ty), mask)
    at = sums + program.to(tl.int64) * (group * groups) + column
    tl.store(at, tl.sum(dweight, 0), within < group)


class Tiling(NamedTuple):
    """The tiles that (rows, d) is cut into."""

    config: NormConfig
    rows: int
    """Rows of a tile."""
    columns: int
    """Channels of a tile, a power of two."""
    blocks: int
    """Tiles below each other."""
    groups: int
    pieces: int
    """Tiles beside each other in a group."""

    def launch(self, kernel, programs: int, *arguments, **constants) -> None:
        config = self.config
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns}
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        launch(kernel, (programs,), *arguments, **sizes, **options, **constants)


def _tiling(rows: int, d: int, group: int) -> Tiling:
    config = choose_config(group)
    columns = min(triton.next_power_of_2(group), config.columns)
    tall = max(1, config.elements // columns)
    return Tiling(config, tall, columns, triton.cdiv(rows, tall), d // group, triton.cdiv(group, columns))


def forward(given: NormInputs, norm_first: bool = True) -> Tensor:
    """See `norm_forward` of the PyTorch form. Without `norm_first` the norm is taken of x times silu(gate), as Mamba-2
    does."""
    x, weight, gate, eps, group_size = given
    shape, d = x.shape, x.shape[-1]
    x, gate, weight = _flat_rows(x), _flat_rows(gate), weight.contiguous()
    group = group_size or d
    tiling = _tiling(x.shape[0], d, group)
    numbers = (x.shape[0], group, tiling.groups, eps)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    scales = None
    if tiling.pieces > 1:
        scales = torch.empty(x.shape[0], tiling.groups, dtype=torch.float32, device=x.device)
        pointers = (None, x, None, None if norm_first else gate, scales, None)
        strides = (0, x.stride(0), 0 if norm_first else gate.stride(0))
        options = {"GRADIENT": False, "NORM_FIRST": norm_first}
        tiling.launch(_statistics, tiling.blocks * tiling.groups, *pointers, *numbers, *strides, **options)
    programs = tiling.blocks * tiling.groups * tiling.pieces
    pointers, strides = (x, weight, gate, y, scales), (x.stride(0), gate.stride(0))
    options = {"CUT": tiling.pieces > 1, "NORM_FIRST": norm_first}
    tiling.launch(_gated_norm, programs, *pointers, *numbers, *strides, **options)
    return y.view(shape)


def backward(given: NormInputs, _: Output, cotangents: Output) -> tuple[Tensor, Tensor, Tensor]:
    """See `norm_backward` of the PyTorch form."""
    dgate = torch.empty_like(given.gate, memory_format=torch.contiguous_format)
    dx, sums = gradients(cotangents.y, given, dgate)
    return dx, sums.sum(0).to(given.weight.dtype), dgate


def gradients(dy: Tensor, given: NormInputs, dgate: Tensor, norm_first: bool = True) -> tuple[Tensor, Tensor]:
    """Writes the gradient of the gate into `dgate`, whose rows may lie apart; returns that of x, and sums (programs, d)
    float32, whose sum over programs is that of the weight."""
    x, weight, gate, eps, group_size = given
    shape, d, wide = x.shape, x.shape[-1], weight.contiguous()
    dy, x, gate = _flat_rows(dy), _flat_rows(x), _flat_rows(gate)
    rows, group = x.shape[0], group_size or d
    tiling = _tiling(rows, d, group)
    strides = (dy.stride(0), x.stride(0), gate.stride(0))
    scales = alongs = None
    if tiling.pieces > 1:
        scales, alongs = torch.empty(2, rows, tiling.groups, dtype=torch.float32, device=x.device)
        arguments = (dy, x, wide, gate, scales, alongs, rows, group, tiling.groups, eps)
        options = {"GRADIENT": True, "NORM_FIRST": norm_first}
        tiling.launch(_statistics, tiling.blocks * tiling.groups, *arguments, *strides, **options)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    across = tiling.groups * tiling.pieces
    walk = triton.cdiv(tiling.blocks, max(1, tiling.config.programs // across))
    programs = triton.cdiv(tiling.blocks, walk)
    sums = torch.empty(programs, d, dtype=torch.float32, device=x.device)
    pointers = (dy, x, wide, gate, dx, dgate, sums, scales, alongs)
    numbers = (rows, walk, group, tiling.groups, eps)
    options = {"CUT": tiling.pieces > 1, "NORM_FIRST": norm_first}
    row_stride = dgate.flatten(0, -2).stride(0)
    tiling.launch(_gradients, programs * across, *pointers, *numbers, *strides, row_stride, **options)
    return dx.view(shape), sums


def _flat_rows(x: Tensor) -> Tensor:
    """(..., d) -> (rows, d) with channels side by side, a view where the strides allow it."""
    return rows_in_place(x.flatten(0, -2))
