"""The Triton form of the layer: launches the kernels of the convolution, the scan and the norm, and what lies between.

All gradients of the projection go into one buffer, and so do those of the convolution's output: every kernel writes its
own columns of it. Nothing here reads values from the device or waits for it, so both passes can be captured in a CUDA
graph.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from matmix.kernels.functions import Output, outside_autocast
from matmix.kernels.gated_norm import fused as norm
from matmix.kernels.gated_norm.chunked import NormInputs
from matmix.kernels.launching import launch, rows_in_place
from matmix.kernels.scan_layer.chunked import LayerInputs, LayerScan
from matmix.kernels.scan_layer.steps import clear_edges, parameter_gradients, step_gradients, step_sizes
from matmix.kernels.semiseparable.form import ScanCall
from matmix.kernels.semiseparable.fused import launch as scan
from matmix.kernels.semiseparable.fused.launch import Into
from matmix.kernels.short_conv import fused as conv
from matmix.kernels.short_conv import parts
from matmix.kernels.short_conv.parts import ConvInputs
from matmix.kernels.slots import count_documents

_ROWS = 32
_COLUMNS = 64
"""Tokens, and heads of both directions, of a tile of step sizes at most."""
_PROGRAMS = 512
"""Programs that sum the gradients of step sizes at most, about."""


@outside_autocast
def forward_scan(given: LayerInputs) -> LayerScan:
    """Convolution, step sizes and scan."""
    projected = rows_in_place(given.projected)
    mixed, product = _mixed(projected, given)
    call = _scan_call(projected, mixed, product, given)
    return LayerScan(scan.forward(call, False).y, *((mixed, product) if given.keep else (None, None)))


@outside_autocast
def forward(given: LayerInputs) -> Tensor:
    """Gate and norm of the scan's output: (batch, seqlen, inner) typed like that."""
    return norm.forward(_norm_inputs(given, given.projected), given.norm_first)


class Gradients(NamedTuple):
    """Gradients of what `scan_layer` takes."""

    projected: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    A_log: Tensor
    norm_weight: Tensor
    D: Tensor | None
    diagonal_weight: Tensor | None
    initial_states: Tensor | None


@outside_autocast
def backward(given: LayerInputs, _: Output, cotangents: Output) -> Gradients:
    """The whole layer's backward pass. Without `mixed` the convolution and the product are computed again."""
    projected, form, y = rows_in_place(given.projected), given.form, given.scanned
    mixed, product = (given.mixed, given.product) if given.mixed is not None else _mixed(projected, given)
    call = _scan_call(projected, mixed, product, given)
    dprojected = torch.empty_like(projected, memory_format=torch.contiguous_format)
    dmixed = torch.empty_like(mixed)
    raw = form.split(projected)[2]
    dz, dx, draw = form.split(dprojected)
    dy, norm_sums = norm.gradients(cotangents.y, _norm_inputs(given, projected), dz, given.norm_first)
    dv, dq, dk = form.values_and_vectors(dmixed)
    if form.scan.shift:
        _clear_edges(dq, call.bounds)
    _, side_gradients, ddiagonal = scan.backward(dy.view(y.shape), None, None, call, Into(dv, tuple(dq), tuple(dk)))
    projects = given.diagonal_weight is not None
    dproduct = torch.empty_like(product) if projects else None
    step_sums = _step_gradients(side_gradients, ddiagonal if projects else None, raw, given, draw, dproduct)
    dweight = more = None
    if projects:
        # The scan no longer needs dy: its memory takes what the diagonal adds to the gradient of v.
        rows = dproduct.flatten(0, -2)
        dweight = torch.mm(rows.t(), mixed[..., : form.inner].flatten(0, -2))
        more = torch.mm(rows, given.diagonal_weight, out=dy.view(-1, form.inner)).view_as(dy)
    conv_sums = _conv_gradients(dmixed, more, _conv_inputs(projected, given), dx)
    small = parameter_gradients(norm_sums, conv_sums, step_sums, given)
    dnorm, dconv, dconv_bias, dbias, dA_log, dD = small
    dstates = None
    if given.initial_states is not None:
        dstates = sum(side.initial_state.sum(0) for side in side_gradients)
        dstates = dstates.mT.to(given.initial_states.dtype).contiguous()
    dD = dD if projects else ddiagonal
    return Gradients(dprojected, dconv, dconv_bias, dbias, dA_log, dnorm, dD, dweight, dstates)


def _norm_inputs(given: LayerInputs, projected: Tensor) -> NormInputs:
    z = given.form.split(projected)[0]
    return NormInputs(given.scanned.flatten(-2), given.norm_weight, z, given.eps, given.group_size)


def _conv_inputs(projected: Tensor, given: LayerInputs) -> ConvInputs:
    x = given.form.split(projected)[1]
    causal, packing = given.directions == 1, (given.cu_seqlens, given.context)
    return ConvInputs(x, given.conv_weight, given.conv_bias, causal, "silu", *packing)


def _conv_gradients(dmixed: Tensor, more: Tensor | None, given: ConvInputs, dx: Tensor) -> Tensor:
    """`conv.gradients`, also of a part of rows, whose `dmixed` it changes."""
    if not given.context:
        return conv.gradients(dmixed, given, dx, more_dy=more)[0]
    if more is not None:
        dmixed[..., : more.shape[2]] += more
    gradient, dweight, dbias = parts.backward(conv, given, None, Output(dmixed))
    dx.copy_(gradient)
    rows = [dweight.t()] if dbias is None else [dweight.t(), dbias.unsqueeze(0)]
    return torch.cat(rows).float().unsqueeze(0)


def _mixed(projected: Tensor, given: LayerInputs) -> tuple[Tensor, Tensor | None]:
    """The convolution's output, and its product with `diagonal_weight`."""
    mixed = parts.forward(conv, _conv_inputs(projected, given))
    if given.diagonal_weight is None:
        return mixed, None
    product = torch.mm(mixed[..., : given.form.inner].flatten(0, -2), given.diagonal_weight.t())
    return mixed, product.view(*mixed.shape[:-1], given.nheads)


def _scan_call(projected: Tensor, mixed: Tensor, product: Tensor | None, given: LayerInputs) -> ScanCall:
    """The scan's arguments. Step sizes and decays are float32: bfloat16 would round the decay of long memories to 1."""
    form = given.form
    raw = form.split(projected)[2].flatten(0, -2)
    rows, columns = raw.shape
    shape = *projected.shape[:2], form.directions, form.heads
    dt, log_decay = (torch.empty(shape, dtype=torch.float32, device=raw.device) for _ in range(2))
    diagonal = given.D
    if product is not None:
        diagonal = torch.empty(product.shape, dtype=torch.float32, device=raw.device)
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    launch(
        step_sizes, (triton.cdiv(rows, _ROWS), triton.cdiv(columns, block)),
        raw, given.dt_bias.contiguous(), given.A_log.contiguous(), product, None if product is None else given.D,
        dt, log_decay, None if product is None else diagonal,
        rows, form.heads, columns, form.low, _finite(form.high), raw.stride(0), form.heads,
        **_step_options(given, block), DIAGONAL=product is not None,
    )  # fmt: skip
    v, q, k = form.values_and_vectors(mixed)
    state = form.scan_states(given.initial_states, count_documents(projected.shape[0], given.cu_seqlens))
    sides = form.sides(q, k, dt, log_decay, state)
    return ScanCall(v, sides, diagonal, form.scan, given.cu_seqlens, given.chunk_size, given.context)


def _step_gradients(
    side_gradients: tuple,
    ddiagonal: Tensor | None,
    raw: Tensor,
    given: LayerInputs,
    draw: Tensor,
    dproduct: Tensor | None,
) -> Tensor:
    """Writes `draw` and `dproduct`, and returns sums (programs, 3, directions nheads) for dt_bias, A_log and D."""
    form = given.form
    raw, draw = raw.flatten(0, -2), draw.flatten(0, -2)
    rows, columns = raw.shape
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    tiles = triton.cdiv(rows, _ROWS)
    walk = triton.cdiv(tiles, _PROGRAMS)
    programs = triton.cdiv(tiles, walk)
    sums = torch.empty(programs, 3, columns, dtype=torch.float32, device=raw.device)
    first, second = side_gradients[0], side_gradients[-1]
    launch(
        step_gradients, (programs, triton.cdiv(columns, block)),
        first.input_scale, second.input_scale, first.log_decay, second.log_decay, ddiagonal,
        raw, given.dt_bias.contiguous(), given.A_log.contiguous(), draw, dproduct, sums,
        rows, walk, form.heads, columns, form.low, _finite(form.high), raw.stride(0), draw.stride(0),
        **_step_options(given, block), TWO=form.directions == 2, DIAGONAL=ddiagonal is not None,
    )  # fmt: skip
    return sums


def _step_options(given: LayerInputs, block: int) -> dict:
    limited, shared = given.low > 0 or given.high is not None, given.dt_bias.numel() == given.nheads
    return {"SHARED": shared, "LIMITED": limited, "ROWS": _ROWS, "COLUMNS": block, "num_warps": 4, "num_stages": 1}


def _finite(high: float) -> float:
    """Returns a finite bound: a kernel's argument of type float32 need not be able to hold infinity."""
    return min(high, 3.0e38)


def _clear_edges(dq: list[Tensor], cu_seqlens: Tensor | None) -> None:
    first, second = dq
    batch, seqlen, groups, d_state = first.shape
    width = groups * d_state
    block = min(1024, triton.next_power_of_2(width))
    launch(
        clear_edges, (count_documents(batch, cu_seqlens), triton.cdiv(width, block)),
        first, second, cu_seqlens, seqlen, first.stride(0), first.stride(1), width,
        PACKED=cu_seqlens is not None, BLOCK=block, num_warps=4, num_stages=1,
    )  # fmt: skip
