"""The Triton form of the scans: launches the kernels of the forward and backward passes.

Nothing here reads values from the device or waits for it, so both passes can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from matmix.kernels.launching import launch, rows_in_place
from matmix.kernels.semiseparable.chunked.setup import reduce_like
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanGradients, ScanOutput, ScanSide, SideGradients
from matmix.kernels.semiseparable.fused.mix import mix
from matmix.kernels.semiseparable.fused.pairs import pair_gradients
from matmix.kernels.semiseparable.fused.scan import (
    Scan,
    configurations,
    force_configuration,
    heads_of_warp,
    one_or_two,
    per_token,
    readable,
    set_up,
    sum_decays,
)
from matmix.kernels.semiseparable.fused.states import States, pass_states
from matmix.kernels.semiseparable.fused.sums import decay_gradients
from matmix.kernels.semiseparable.fused.vectors import vector_gradients


class Into(NamedTuple):
    """Tensors, strided as they may be, that the gradients of v, q and k are written into. All q and k share one set of
    strides. With shift, rows of q that nobody reads with are left as they are."""

    v: Tensor
    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """The gradients of one pass."""

    v: Tensor
    sides: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
    """Gradients of q, k (typed as they are), log-decays and input scales (float32, per token and head), by direction.
    """
    along: Tensor | None
    """dy . v per token and head where there is a diagonal."""


def gradients(
    scan: Scan,
    v: Tensor,
    dys: list[Tensor],
    drow_sum: Tensor | None,
    sides: tuple[ScanSide, ...],
    diagonal: Tensor | None,
    form: ScanForm,
    sums: Tensor | None,
    triangle: Tensor,
    entering: States | None,
    leaving: States | None,
    into: Into | None = None,
) -> Gradients:
    """The backward pass of one scan, from the states at the edges of its chunks."""
    two, stored = len(sides) == 2, entering is not None
    cross = scan.chunk > scan.tile
    first, second, self_weight = one_or_two(sides, form)
    # Heads in one program share the last products; fewer of them where that would leave the GPU idle.
    heads = scan.heads_at_once(scan.share)
    blocks = scan.share // heads
    programs, factors = scan.tiles * (scan.heads // heads), v.shape[:3]
    tokens = scan.rows * scan.seqlen

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=v.device)

    def factor(wanted: bool, *parts: int) -> Tensor | None:
        return empty(*parts, *factors) if wanted else None

    gated = [side.log_decay is not None for side in (first, second)]
    scaled = [side.input_scale is not None for side in (first, second)]
    decays, scales = ([factor(there) for there in which] for which in (gated, scaled))
    crossed, entered = (factor(cross and any(gated)) for _ in range(2))
    normalize = drow_sum is not None
    dscores = empty(programs, 2 if cross else 1, scan.tile, scan.tile, dtype=torch.float32 if normalize else v.dtype)
    own_scores = None if form.shift else empty(programs, len(sides), scan.tile)
    halves = two and form.combine == "concat"
    along, along2 = factor(diagonal is not None), factor(diagonal is not None and halves)
    dv = empty(*v.shape, dtype=v.dtype) if into is None else into.v
    block_n, _, block_p, _ = scan.blocks(scan.config.pair_block)
    per_row, table = scan.per_row(scan.chunk), scan.table(scan.chunk)
    of_sides = []
    for side in (first, second):
        of_sides += [side.q, *side.q.stride()[:3], side.k, *side.k.stride()[:3]]
    weights = *per_token(first.input_scale), *per_token(second.input_scale)
    common = {
        "TWO": two, "REVERSE": first.reverse, "SHIFT": form.shift, "GATED1": gated[0], "GATED2": gated[1],
        "SCALED1": scaled[0], "SCALED2": scaled[1], "PACKED": table is not None, "WHOLE": scan.whole,
        "CHUNK": scan.chunk, "TILE": scan.tile,
    }  # fmt: skip
    precise = {
        "STORED": stored, "FACTORS": scan.factors(sides), "HEADS": heads, "D_STATE": scan.d_state,
        "HEADDIM": scan.headdim, "NORMALIZE": normalize, "PRECISION": scan.precision, "EXACT": scan.exact,
    }  # fmt: skip
    launch(
        pair_gradients, (programs,),
        dv, *dv.stride()[:3], dscores, own_scores,
        decays[0], scales[0], decays[1], scales[1], crossed, entered, along, along2,
        dys[0], dys[-1], *dys[0].stride()[:3], v, *v.stride()[:3], *of_sides, *per_token(diagonal),
        *per_token(drow_sum), *weights, sums, triangle, leaving.states if stored else None, table, scan.seqlen, per_row,
        tokens, scan.heads, scan.share, self_weight,
        num_warps=scan.config.pair_warps, num_stages=1, maxnreg=scan.config.pair_registers,
        **common, DIAGONAL=diagonal is not None, HALVES=halves, INITIAL=stored and leaving.given,
        BLOCK_N=block_n, BLOCK_P=block_p, **precise,
    )  # fmt: skip

    block_n, n_blocks, block_p, _ = scan.blocks(scan.config.vector_block)
    reads, wrotes, throughs = [None, None], [None, None], [None, None]
    if stored:
        wanted = any(gated) or any(scaled)
        reads, wrotes = ([factor(wanted, n_blocks) for _ in sides] + [None] for _ in range(2))
        throughs = [empty(n_blocks, scan.tiles, scan.heads) if any(gated) else None for _ in sides] + [None]
    if blocks == 1 and into is not None:
        dqs, dks = ([x.unsqueeze(0) for x in given] for given in (into.q, into.k))
    else:
        shape, dtype = (blocks, *first.q.shape), v.dtype if blocks == 1 else torch.float32
        # With shift nobody reads for a document's last (or first) token.
        make = torch.zeros if form.shift else torch.empty
        dqs = [make(shape, dtype=dtype, device=v.device) for _ in sides]
        dks = [empty(*shape, dtype=dtype) for _ in sides]
    launch(
        vector_gradients, (programs, n_blocks, 2 * len(sides)),
        dqs[0], dks[0], dqs[-1], dks[-1], *dqs[0].stride()[:4], dscores, own_scores,
        reads[0], wrotes[0], throughs[0], reads[1], wrotes[1], throughs[1], factors.numel(), scan.tiles * scan.heads,
        dys[0], dys[-1], *dys[0].stride()[:3], v, *v.stride()[:3], *of_sides, *per_token(drow_sum), *weights,
        sums, entering.states if stored else None, entering.vectors if stored else None,
        leaving.states if stored else None, leaving.vectors if stored else None,
        table, scan.seqlen, per_row, tokens, scan.heads, scan.share,
        num_warps=scan.config.vector_warps, num_stages=1, maxnreg=scan.config.vector_registers,
        **common, ENTERS=stored and entering.given, LEAVES=stored and leaving.given, BLOCK_N=block_n, BLOCK_P=block_p,
        **precise,
    )  # fmt: skip

    das, dws = [factor(there) for there in gated], [factor(there) for there in scaled]
    if any(gated) or any(scaled):
        block = heads_of_warp(scan.heads, scan.chunk, 512)
        launch(
            decay_gradients, (scan.slots(scan.chunk), triton.cdiv(scan.heads, block)),
            das[0], dws[0], decays[0], scales[0], reads[0], wrotes[0], throughs[0],
            das[1], dws[1], decays[1], scales[1], reads[1], wrotes[1], throughs[1],
            crossed, entered, factors.numel(), scan.tiles * scan.heads,
            *per_token(first.log_decay), *per_token(second.log_decay), *weights,
            table, scan.seqlen, per_row, tokens, scan.heads, num_warps=1, num_stages=1,
            **common, STATES=stored, PARTS=n_blocks, BLOCK_H=block,
        )  # fmt: skip
    targets = zip(into.q, into.k, strict=True) if into is not None else [(None, None)] * len(sides)
    side_gradients = [
        (summed(dq, v.dtype, to_q), summed(dk, v.dtype, to_k), da, dw)
        for dq, dk, da, dw, (to_q, to_k) in zip(dqs, dks, das[: len(sides)], dws[: len(sides)], targets, strict=True)
    ]
    return Gradients(dv, side_gradients, along + along2 if halves and diagonal is not None else along)


def summed(parts: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
    """The sum of parts that several programs found, in a fixed order."""
    if into is None:
        return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)
    if parts.shape[0] > 1 or parts.dtype != dtype:
        into.copy_(parts.sum(0))
    return into


__all__ = ["backward", "configurations", "force_configuration", "forward"]


def forward(call: ScanCall, final_state: bool) -> ScanOutput:
    """See `scan_forward` of the PyTorch form."""
    v, sides, diagonal, form, cu_seqlens, chunk_size = call
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
    call: ScanCall,
    into: Into | None = None,
) -> ScanGradients:
    """See `scan_backward` of the PyTorch form. `into`: where the gradients of v, q and k are to be written."""
    v, sides, diagonal, form, cu_seqlens, chunk_size = call
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
    gradients_of_all = gradients(
        scan, v, parts, drow_sum, sides, diagonal, form, sums, triangle, entering, leaving, into
    )
    finished = []
    for number, (side, (dq, dk, da, dw)) in enumerate(zip(given, gradients_of_all.sides, strict=True)):
        initial = None
        if side.initial_state is not None:
            # Copied: of one document and head the slice is contiguous as it is, and outputs of an op share no memory.
            ends = leaving.ends[:, :, number]
            initial = ends.to(side.initial_state.dtype, copy=True, memory_format=torch.contiguous_format)
        da = None if da is None else reduce_like(da, side.log_decay)
        dw = None if dw is None else dw.to(side.input_scale.dtype)
        finished.append(SideGradients(dq, dk, da, dw, initial))
    ddiagonal = None if diagonal is None else reduce_like(gradients_of_all.along, diagonal)
    return ScanGradients(gradients_of_all.v, tuple(finished), ddiagonal)
