"""The Triton form of the scans: launches the kernels of the forward and backward passes.

Nothing here reads values from the device or waits for it, so both passes can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.launching import launch, rows_in_place
from matmix.kernels.semiseparable.chunked.setup import reduce_like
from matmix.kernels.semiseparable.form import ScanForm, ScanOutput, ScanSide, SideGradients
from matmix.kernels.semiseparable.fused.carry import pass_states
from matmix.kernels.semiseparable.fused.collect import Into, gradients
from matmix.kernels.semiseparable.fused.configs import configurations, force_configuration
from matmix.kernels.semiseparable.fused.mix import mix
from matmix.kernels.semiseparable.fused.scan import one_or_two, per_token, readable, set_up, sum_decays

__all__ = ["backward", "configurations", "force_configuration", "forward"]


def forward(
    v: Tensor,
    sides: tuple[ScanSide, ...],
    diagonal: Tensor | None,
    form: ScanForm,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    final_state: bool,
) -> ScanOutput:
    """See `scan_forward` of the PyTorch form."""
    scan = set_up(v, sides[0].q, cu_seqlens, chunk_size, False)
    v, sides = rows_in_place(v), tuple(map(readable, sides))
    sums = sum_decays(scan, sides)
    initial = [side.initial_state for side in sides]
    carried = scan.seqlen > scan.chunk or any(state is not None for state in initial)
    states = None
    walk = scan.walks and not final_state and not any(state is not None for state in initial)
    # The direction whose states are carried along needs none at the chunks' edges.
    passed = sides[1:] if walk else sides
    carried = carried and len(passed) > 0
    if carried or final_state:
        states = pass_states(
            scan, passed, [side.k for side in passed], [v] * len(passed), initial, form, sums,
            cotangent=False, want_ends=final_state, store=carried, before=len(sides) - len(passed),
        )  # fmt: skip
    two = len(sides) == 2
    concat = form.combine == "concat" and two
    y = torch.empty(*v.shape[:3], scan.headdim * (2 if concat else 1), dtype=v.dtype, device=v.device)
    row_sums = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device) if form.normalize else None
    rest = torch.empty_like(y) if form.normalize and v.itemsize < 4 else None
    first, second, self_weight = one_or_two(sides, form)
    vectors: list = []
    for side in (first, second):
        vectors += [side.q, *side.q.stride()[:3], side.k, *side.k.stride()[:3]]
    block_n, _, block_p, p_blocks = scan.blocks(scan.config.block)
    heads = 1 if walk else scan.heads_at_once(scan.config.heads)
    launch(
        mix, (scan.documents * scan.heads if walk else scan.tiles * (scan.heads // heads), p_blocks),
        y, *y.stride()[:3], row_sums, rest, v, *v.stride()[:3], *vectors,
        *per_token(diagonal), *per_token(first.input_scale), *per_token(second.input_scale), sums,
        states.states if carried else None, states.vectors if carried else None,
        scan.cu_seqlens if walk else scan.table(scan.chunk),
        scan.seqlen, scan.per_row(scan.chunk), scan.heads, scan.share, self_weight, form.eps,
        num_warps=scan.config.mix_warps, num_stages=1, maxnreg=scan.config.mix_registers,
        TWO=two, REVERSE=first.reverse, SHIFT=form.shift, GATED1=first.log_decay is not None,
        GATED2=second.log_decay is not None, SCALED1=first.input_scale is not None,
        SCALED2=second.input_scale is not None, DIAGONAL=diagonal is not None, STORED=carried,
        INITIAL=carried and states.given, NORMALIZE=row_sums is not None, REST=rest is not None,
        COMBINE=form.combine if two else "add", PACKED=scan.cu_seqlens is not None, WHOLE=scan.whole, CHUNK=scan.chunk,
        TILE=scan.tile, FACTORS=scan.factors(sides), HEADS=heads, WALK=walk, D_STATE=scan.d_state,
        HEADDIM=scan.headdim, BLOCK_N=block_n, BLOCK_P=block_p, PRECISION=scan.precision, EXACT=scan.exact,
    )  # fmt: skip
    return ScanOutput(y, row_sums, states.ends[:, :, 0] if final_state else None, rest)


def backward(
    dy: Tensor,
    drow_sum: Tensor | None,
    dfinal: Tensor | None,
    v: Tensor,
    sides: tuple[ScanSide, ...],
    diagonal: Tensor | None,
    form: ScanForm,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    into: Into | None = None,
) -> tuple[Tensor, tuple[SideGradients, ...], Tensor | None]:
    """See `scan_backward` of the PyTorch form. `into`: where the gradients of v, q and k are to be written."""
    scan = set_up(v, sides[0].q, cu_seqlens, chunk_size, True)
    # The scan is linear here; states need sums of rows where the cotangent of those is given.
    form, given = form._replace(normalize=drow_sum is not None), sides
    v, sides, dy = rows_in_place(v), tuple(map(readable, sides)), rows_in_place(dy)
    count, p = len(sides), scan.headdim
    parts = [dy[..., :p], dy[..., p:]] if form.combine == "concat" and count == 2 else [dy] * count
    initial = [side.initial_state for side in sides]
    starts = any(state is not None for state in initial)
    carried = scan.seqlen > scan.chunk or starts or dfinal is not None
    # What it is multiplied with is split in two numbers of bfloat16; a float16 could not hold it.
    triangle = v.new_empty(scan.tile, scan.tile, dtype=torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32)
    sums = sum_decays(scan, sides, triangle)
    entering = leaving = None
    if carried:
        entering = pass_states(
            scan, sides, [side.k for side in sides], [v] * count, initial, form, sums, cotangent=False
        )
        leaving = pass_states(
            scan, sides, [side.q for side in sides], parts, [dfinal, *[None] * (count - 1)], form, sums,
            cotangent=True, sum_factor=drow_sum, want_ends=starts,
        )  # fmt: skip
    found = gradients(scan, v, parts, drow_sum, sides, diagonal, form, sums, triangle, entering, leaving, into)
    finished = []
    for number, (side, (dq, dk, da, dw)) in enumerate(zip(given, found.sides, strict=True)):
        initial = None
        if side.initial_state is not None:
            # Copied: of one document and head the slice is contiguous as it is, and outputs of an op share no memory.
            ends = leaving.ends[:, :, number]
            initial = ends.to(side.initial_state.dtype, copy=True, memory_format=torch.contiguous_format)
        da = None if da is None else reduce_like(da, side.log_decay)
        dw = None if dw is None else dw.to(side.input_scale.dtype)
        finished.append(SideGradients(dq, dk, da, dw, initial))
    return found.v, tuple(finished), None if diagonal is None else reduce_like(found.along, diagonal)
