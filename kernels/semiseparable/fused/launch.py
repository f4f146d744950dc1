"""The Triton form of the scans: launches the kernels of the forward and backward passes.

Nothing here reads values from the device or waits for it, so both passes can be captured in a CUDA graph.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from matmix.kernels.launching import launch, rows_in_place
from matmix.kernels.semiseparable.chunked.setup import reduce_like
from matmix.kernels.semiseparable.context import Part, edge_row
from matmix.kernels.semiseparable.form import ScanCall, ScanGradients, ScanOutput, ScanSide, SideGradients
from matmix.kernels.semiseparable.fused import scan as scans
from matmix.kernels.semiseparable.fused.mix import mix
from matmix.kernels.semiseparable.fused.pairs import pair_gradients
from matmix.kernels.semiseparable.fused.parts import Entering
from matmix.kernels.semiseparable.fused.scan import configurations, force_configuration, per_token, rows
from matmix.kernels.semiseparable.fused.states import States, pass_states
from matmix.kernels.semiseparable.fused.sums import decay_gradients
from matmix.kernels.semiseparable.fused.vectors import vector_gradients

__all__ = ["backward", "configurations", "force_configuration", "forward"]


class Into(NamedTuple):
    """Tensors, strided as they may be, that the gradients of v, q and k are written into. All q and k share one set of
    strides. With shift, rows of q that nobody reads with are left as they are."""

    v: Tensor
    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]


def forward(call: ScanCall, final_state: bool) -> ScanOutput:
    """See `scan_forward` of the PyTorch form."""
    if call.context and call.form.shift and call.form.combine == "mult":
        return _multiplied(call, final_state)
    scan, call = scans.set_up(call, backward=False)
    v, sides, diagonal, form, *_ = call
    sums = scans.sum_decays(scan, sides)
    part = Part.of(call)
    entering = None if part is None else Entering(scan, call, part, sums)
    initial = _initial_states(sides, part)
    starts = part is not None or any(state is not None for state in initial)
    walk = scan.walks and not final_state and not starts
    # The direction whose states are carried along needs none at the chunks' edges.
    passed = sides[1:] if walk else sides
    carried = (scan.seqlen > scan.chunk or starts) and len(passed) > 0
    states = States(None, None, None, None, False)
    if carried or final_state:
        states = pass_states(
            scan, call._replace(sides=passed), [v] * len(passed), initial, sums, want_ends=final_state, store=carried,
            before=len(sides) - len(passed), send=None if entering is None else entering.send,
        )  # fmt: skip
    if entering is not None:
        entering.add_to(states, final_state)
    two = len(sides) == 2
    width = scan.headdim * (2 if two and form.combine == "concat" else 1)
    y = torch.empty(*v.shape[:3], width, dtype=v.dtype, device=v.device)
    row_sums = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device) if form.normalize else None
    rest = torch.empty_like(y) if form.normalize and v.itemsize < 4 else None
    first, second, self_weight = scans.one_or_two(sides, form)
    heads = 1 if walk else scan.heads_at_once(scan.config.heads)
    launch(
        mix, (scan.documents * scan.heads if walk else scan.tiles * (scan.heads // heads), scan.blocks("block")[3]),
        *rows(y), row_sums, rest, *rows(v), *rows(first.q), *rows(first.k), *rows(second.q), *rows(second.k),
        *per_token(diagonal), *per_token(first.input_scale), *per_token(second.input_scale), sums,
        states.states if carried else None, states.vectors if carried else None,
        scan.cu_seqlens if walk else scan.table(scan.chunk),
        scan.seqlen, scan.per_row(scan.chunk), scan.heads, scan.share, self_weight, form.eps,
        **scan.constants(sides, form, "block"), num_warps=scan.config.mix_warps, num_stages=1,
        maxnreg=scan.config.mix_registers, DIAGONAL=diagonal is not None, STORED=carried,
        INITIAL=carried and states.given, NORMALIZE=form.normalize, REST=rest is not None,
        COMBINE=form.combine if two else "add", HEADS=heads, WALK=walk,
    )  # fmt: skip
    if entering is not None and form.shift:
        entering.read_at_edges(y, row_sums, rest)
    finals = None
    if final_state:
        # Outputs of an op share no memory.
        ends = states.finals.unbind(2)
        finals = tuple(end.clone() for end in ends) if two else ends
        if part is not None:
            finals = tuple(part.own(end, side.reverse) for end, side in zip(finals, sides, strict=True))
    return ScanOutput(y, row_sums, finals, rest)


def _multiplied(call: ScanCall, final_state: bool) -> ScanOutput:
    """The product of the two directions of a part, which need what their edges read before they are multiplied."""
    v, diagonal = call.v, call.diagonal
    halves = forward(call._replace(diagonal=None, form=call.form._replace(combine="concat")), final_state)
    y = torch.mul(*halves.y.float().chunk(2, -1))
    if diagonal is not None:
        y.addcmul_(diagonal.float().unsqueeze(-1), v)
    return halves._replace(y=y.to(v.dtype))


def _initial_states(sides: tuple[ScanSide, ...], part: Part | None) -> list[Tensor | None]:
    """The states that directions begin with; of a part those of what begins in it."""
    states = [side.initial_state for side in sides]
    if part is None:
        return states
    return [part.own(state, not side.reverse) for state, side in zip(states, sides, strict=True)]


def backward(
    dy: Tensor,
    drow_sum: Tensor | None,
    dfinals: tuple[Tensor | None, ...] | None,
    call: ScanCall,
    into: Into | None = None,
) -> ScanGradients:
    """See `scan_backward` of the PyTorch form. `into`: where the gradients of v, q and k are to be written."""
    # The scan is linear here; states need sums of rows where the cotangent of those is given.
    given, call = call.sides, call._replace(form=call.form._replace(normalize=drow_sum is not None))
    scan, call = scans.set_up(call, backward=True)
    v, sides, diagonal, form, *_ = call
    dy, count, p = rows_in_place(dy), len(sides), scan.headdim
    halves = form.combine == "concat" and count == 2
    dys = [dy[..., :p], dy[..., p:]] if halves else [dy] * count
    # What it is multiplied with is split in two numbers of bfloat16; a float16 could not hold it.
    triangle = v.new_empty(scan.tile, scan.tile, dtype=torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32)
    sums = scans.sum_decays(scan, sides, triangle)
    part = Part.of(call)
    initial = _initial_states(sides, part)
    starts = any(state is not None for state in initial)
    stored = scan.seqlen > scan.chunk or starts or dfinals is not None or part is not None
    entering = leaving = States(None, None, None, None, False)
    if part is not None:
        dfinals = [
            part.own(dfinal, side.reverse) for dfinal, side in zip(dfinals or [None] * count, sides, strict=True)
        ]
        entered, back = (Entering(scan, call, part, sums, cotangent) for cotangent in (False, True))

        def send_back(ends: Tensor, vectors: Tensor | None) -> None:
            entered.add_to(entering, False)
            back.send_back(entered, dys, drow_sum, ends, vectors)

    if stored:
        entering = pass_states(scan, call, [v] * count, initial, sums, send=None if part is None else entered.send)
        leaving = pass_states(
            scan, call, dys, dfinals or [None] * count, sums, cotangent=True, sum_factor=drow_sum,
            want_ends=starts, send=None if part is None else send_back,
        )  # fmt: skip
    if part is not None:
        back.add_to(leaving, starts)

    cross = scan.chunk > scan.tile
    first, second, self_weight = scans.one_or_two(sides, form)
    gated = [side.log_decay is not None for side in (first, second)]
    scaled = [side.input_scale is not None for side in (first, second)]
    # Heads in one program share the last products; fewer of them where that would leave the GPU idle.
    heads = scan.heads_at_once(scan.share)
    blocks = scan.share // heads
    programs, tokens = scan.tiles * (scan.heads // heads), scan.rows * scan.seqlen

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=v.device)

    def factor(wanted: bool, *parts: int) -> Tensor | None:
        """A number for each token and head."""
        return empty(*parts, *v.shape[:3]) if wanted else None

    decays, scales = ([factor(there) for there in which] for which in (gated, scaled))
    crossed, entered = (factor(cross and any(gated)) for _ in range(2))
    along, along2 = factor(diagonal is not None), factor(diagonal is not None and halves)
    exact = torch.float32 if form.normalize else v.dtype
    dscores = empty(programs, 2 if cross else 1, scan.tile, scan.tile, dtype=exact)
    own_scores = None if form.shift else empty(programs, count, scan.tile)
    dv = empty(*v.shape, dtype=v.dtype) if into is None else into.v
    vectors = *rows(first.q), *rows(first.k), *rows(second.q), *rows(second.k)
    weights = *per_token(first.input_scale), *per_token(second.input_scale)
    place = scan.table(scan.chunk), scan.seqlen, scan.per_row(scan.chunk), tokens, scan.heads
    precise = {"STORED": stored, "HEADS": heads, "NORMALIZE": form.normalize, "num_stages": 1}
    launch(
        pair_gradients, (programs,),
        *rows(dv), dscores, own_scores, decays[0], scales[0], decays[1], scales[1], crossed, entered, along, along2,
        dys[0], *rows(dys[-1]), *rows(v), *vectors, *per_token(diagonal), *per_token(drow_sum), *weights, sums,
        triangle, leaving.states, *place, scan.share, self_weight,
        **scan.constants(sides, form, "pair_block"), **precise, num_warps=scan.config.pair_warps,
        maxnreg=scan.config.pair_registers, DIAGONAL=diagonal is not None, HALVES=halves, INITIAL=leaving.given,
    )  # fmt: skip

    n_blocks = scan.blocks("vector_block")[1]
    wanted = stored and (any(gated) or any(scaled))
    reads, wrotes = ([factor(wanted, n_blocks) for _ in sides] + [None] for _ in range(2))
    through = stored and any(gated)
    throughs = [empty(n_blocks, scan.tiles, scan.heads) if through else None for _ in sides] + [None]
    if blocks == 1 and into is not None:
        dqs, dks = ([x.unsqueeze(0) for x in targets] for targets in (into.q, into.k))
    else:
        shape, dtype = (blocks, *first.q.shape), v.dtype if blocks == 1 else torch.float32
        # With shift nobody reads for a document's last (or first) token.
        make = torch.zeros if form.shift else torch.empty
        dqs = [make(shape, dtype=dtype, device=v.device) for _ in sides]
        dks = [empty(*shape, dtype=dtype) for _ in sides]
    launch(
        vector_gradients, (programs, n_blocks, 2 * count),
        dqs[0], dks[0], dqs[-1], dks[-1], *dqs[0].stride()[:4], dscores, own_scores,
        reads[0], wrotes[0], throughs[0], reads[1], wrotes[1], throughs[1], tokens * scan.heads,
        scan.tiles * scan.heads, dys[0], *rows(dys[-1]), *rows(v), *vectors, *per_token(drow_sum), *weights, sums,
        entering.states, entering.vectors, leaving.states, leaving.vectors, *place, scan.share,
        **scan.constants(sides, form, "vector_block"), **precise, num_warps=scan.config.vector_warps,
        maxnreg=scan.config.vector_registers, ENTERS=entering.given, LEAVES=leaving.given,
    )  # fmt: skip

    das, dws = [factor(there) for there in gated], [factor(there) for there in scaled]
    if any(gated) or any(scaled):
        block = scans.heads_of_warp(scan.heads, scan.chunk, 512)
        launch(
            decay_gradients, (scan.slots(scan.chunk), triton.cdiv(scan.heads, block)),
            das[0], dws[0], decays[0], scales[0], reads[0], wrotes[0], throughs[0],
            das[1], dws[1], decays[1], scales[1], reads[1], wrotes[1], throughs[1],
            crossed, entered, tokens * scan.heads, scan.tiles * scan.heads,
            *per_token(first.log_decay), *per_token(second.log_decay), *weights, *place,
            **scan.constants(sides, form, "vector_block"), num_warps=1, num_stages=1, STATES=stored, PARTS=n_blocks,
            BLOCK_H=block,
        )  # fmt: skip
    gradients, finals = [], leaving.finals
    for number, side in enumerate(given):
        to_q, to_k = (None, None) if into is None else (into.q[number], into.k[number])
        initial = None
        if side.initial_state is not None:
            # Copied: of one document and head the slice is contiguous as it is, and outputs of an op share no memory.
            ends = finals[:, :, number]
            ends = ends if part is None else part.own(ends, not side.reverse)
            initial = ends.to(side.initial_state.dtype, copy=True, memory_format=torch.contiguous_format)
        da = None if das[number] is None else reduce_like(das[number], side.log_decay)
        dw = None if dws[number] is None else dws[number].to(side.input_scale.dtype)
        dq, dk = _summed(dqs[number], v.dtype, to_q), _summed(dks[number], v.dtype, to_k)
        if part is not None and form.shift:
            edge_row(dq, not side.reverse).add_(back.rows[number])
        gradients.append(SideGradients(dq, dk, da, dw, initial))
    along = along + along2 if along2 is not None else along
    return ScanGradients(dv, tuple(gradients), None if diagonal is None else reduce_like(along, diagonal))


def _summed(parts: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """The sum of parts that several programs have left, in a fixed order."""
    if into is None:
        return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)
    if parts.shape[0] > 1 or parts.dtype != dtype:
        into.copy_(parts.sum(0))
    return into
