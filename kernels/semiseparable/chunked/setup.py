"""Cuts a scan into directions, chunks, decays and masks, in the same way for forward and backward passes, carries
states between chunks, and counts the FLOPs of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.checks import can_look
from matmix.kernels.documents import ChunkLayout, chunk_layout, shift_left, shift_right
from matmix.kernels.functions import working_dtype
from matmix.kernels.semiseparable.chunked.decay import SideDecay, growth, side_decay
from matmix.kernels.semiseparable.context import Part, Passing, log_decays
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanSide


class ScanSetup(NamedTuple):
    """Everything that forward and backward passes prepare in the same way."""

    layout: ChunkLayout
    dtype: torch.dtype
    groups: int
    exclusive: bool
    """Hydra's shift: rows read before their own token."""
    own_weight: float
    """Two directions without shift: what a token's own terms, which no mask holds then, count; else 0."""
    sides: tuple[ScanSide, ...]
    """With q and k as chunks (M, chunk, ngroups, d_state) and q already shifted."""
    scales: tuple[Tensor | None, ...]
    """Input scales as chunks (M, chunk, nheads)."""
    decays: tuple[SideDecay, ...]
    masks: tuple[Tensor, ...]
    """(M or 1, chunk, chunk): `growth` of decays where a side's scores count, else 0."""
    carries: tuple[bool, ...]
    """True if any state enters a chunk of this side."""
    chunks_at_once: int
    """Chunks worked on at a time, so that chunk matrices stay in the cache."""
    part: Part | None
    """Where other ranks hold the rest of the rows."""

    def own_ends(self, states: SideStates) -> Tensor:
        """The states at the ends of rows or documents; in a part zeros for those that end elsewhere."""
        return states.ends if self.part is None else self.part.own(states.ends, not states.rightwards)


def default_scan_chunk(seqlen: int, d_state: int, headdim: int) -> int:
    """Chunk length where the work inside chunks and the work on states balance; short sequences are one chunk."""
    if seqlen <= 128:
        return max(16, 1 << (seqlen - 1).bit_length())
    return 64


def spoilt(call: ScanCall, dy: Tensor | None) -> bool:
    """Returns whether packed documents need chunks of their own: in a common one they are kept apart by products with
    an exact zero, which a NaN or an infinity survives. Looks on the CPU alone, at sums, which both survive too; one of
    float16 that overflows costs time and changes nothing else."""
    if call.cu_seqlens is None or not can_look(call.v):
        return False
    given = [call.v, dy, *(x for side in call.sides for x in (side.q, side.k, side.input_scale))]
    if any(not x.sum().isfinite() for x in given if x is not None):
        return True
    # Decays may be zero, the exponential of -inf.
    return any(side.log_decay.sum().isnan() for side in call.sides if side.log_decay is not None)


def set_up_scan(call: ScanCall, final_state: bool, dy: Tensor | None = None) -> ScanSetup:
    """Sets up both directions of one linear scan: of its form, only `shift` and `self_term` matter here. dy: the
    cotangent of its output, in the backward pass."""
    v, sides, form, chunk_size = call.v, call.sides, call.form, call.chunk_size
    cu_seqlens, part = call.bounds, Part.of(call)
    batch, seqlen, heads, headdim = v.shape
    exclusive, both = form.shift, len(sides) == 2
    own_weight = 0.0 if exclusive or not both else 0.5 if form.self_term == "mean" else 1.0
    groups, d_state = sides[0].q.shape[2:]
    dtype = working_dtype(v)
    chunk = chunk_size or default_scan_chunk(seqlen, d_state, headdim)
    given = any(side.initial_state is not None for side in sides)
    layout = chunk_layout(batch, seqlen, chunk, cu_seqlens, aligned=given or final_state or spoilt(call, dy))

    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    grown = growth(chunk, exclusive, v.device, dtype)
    same = None
    if layout.documents is not None:
        same = layout.documents[:, :, None] == layout.documents[:, None, :]
    chunks, scales, decays, masks, carries = [], [], [], [], []
    for side in sides:
        q = side.q
        if exclusive:
            q = shift_left(q, cu_seqlens) if side.reverse else shift_right(q, cu_seqlens)
        chunks.append(side._replace(q=layout.split(q), k=layout.split(side.k)))
        scales.append(None if side.input_scale is None else layout.split(side.input_scale).to(dtype))
        decays.append(side_decay(side, layout, heads, exclusive, dtype, same))
        mask = lower.mT if side.reverse else lower
        if exclusive or both:
            mask = mask & ~torch.eye(chunk, dtype=torch.bool, device=v.device)
        masks.append(((mask & same) if same is not None else mask[None]) * grown)
        carries.append(layout.per_row > 1 or side.initial_state is not None or part is not None)
    # A few MB of chunk matrices fit a CPU's caches and keep its cores busy; accelerators want more at once.
    budget = 3 << 20 if v.device.type == "cpu" else 1 << 28
    chunks_at_once = max(1, budget // (heads * chunk * max(chunk, headdim) * dtype.itemsize))
    return ScanSetup(
        layout, dtype, groups, exclusive, own_weight, tuple(chunks), tuple(scales), tuple(decays), tuple(masks),
        tuple(carries), chunks_at_once, part,
    )  # fmt: skip


def chunk_blocks(setup: ScanSetup) -> list[slice]:
    """All chunks, as slices of as many as are computed at a time."""
    count = setup.layout.rows * setup.layout.per_row
    return [slice(start, min(start + setup.chunks_at_once, count)) for start in range(0, count, setup.chunks_at_once)]


def spread_heads(x: Tensor | None, layout: ChunkLayout, dtype: torch.dtype) -> Tensor | None:
    """A per-head (nheads,) or per-token (batch, seqlen, nheads) factor as chunks (M, chunk, nheads)."""
    if x is None:
        return None
    if x.dim() == 1:
        return x.to(dtype).expand(layout.rows * layout.per_row, layout.chunk, -1)
    return layout.split(x).to(dtype)


def reduce_like(gradient: Tensor, like: Tensor) -> Tensor:
    """(batch, seqlen, nheads) summed to (nheads,) where the input was given per head."""
    return (gradient.sum((0, 1)) if like.dim() == 1 else gradient).to(like.dtype)


def grouped_rows(x: Tensor, groups: int) -> Tensor:
    """(m, chunk, nheads, headdim) -> (m, ngroups, chunk, heads of the group * headdim)."""
    m, chunk, heads, headdim = x.shape
    return x.reshape(m, chunk, groups, heads // groups * headdim).transpose(1, 2)


def ungrouped_rows(x: Tensor, heads: int) -> Tensor:
    """The inverse of `grouped_rows`."""
    m, groups, chunk, width = x.shape
    return x.transpose(1, 2).reshape(m, chunk, heads, width * groups // heads)


def pass_states(local: Tensor, total: Tensor, boundary: Tensor | None, layout: ChunkLayout, rightwards: bool) -> Tensor:
    """Carry states over chunks, in place: entering_{c+1} = total_c entering_c + local_c.

    local (M, ngroups, d_state, width) holds what each chunk adds and is overwritten by the state that enters it; total
    (M, nheads); boundary (rows or documents, nheads, d_state, headdim) is the state at the start, None for zero.
    Returns the states at the end, shaped like `boundary` (in the dense layout of packed documents (1, ...): that of the
    document at this end of the row).
    """
    rows, count = (1, local.shape[0]) if layout.aligned else (layout.rows, layout.per_row)
    groups, d_state = local.shape[1:3]
    heads = total.shape[-1]
    local = local.view(rows, count, groups, d_state, heads // groups, -1)
    total = total.view(rows, count, groups, 1, heads // groups, 1)
    start = None if boundary is None else as_chunk_state(boundary, groups).to(local.dtype)
    enters: dict[int, int] = {}
    leaves: dict[int, int] = {}
    if layout.aligned:
        entry, exits = (layout.firsts, layout.lasts) if rightwards else (layout.lasts, layout.firsts)
        enters = {chunk: document for document, chunk in enumerate(entry) if chunk >= 0}
        leaves = {chunk: document for document, chunk in enumerate(exits) if chunk >= 0}
        # A document without tokens hands its state on unchanged.
        shape = (len(entry), groups, d_state, heads // groups, local.shape[-1])
        final = local.new_zeros(shape) if start is None else start.clone()
    state = local.new_zeros(rows, *local.shape[2:]) if start is None or layout.aligned else start.clone()
    spare = torch.empty_like(state)
    for chunk in range(count) if rightwards else reversed(range(count)):
        if chunk in enters:
            state.zero_() if start is None else state.copy_(start[enters[chunk]])
        here = local[:, chunk]
        torch.addcmul(here, total[:, chunk], state, out=spare)
        here.copy_(state)
        state, spare = spare, state
        if chunk in leaves:
            final[leaves[chunk]] = state[0]
    if not layout.aligned:
        final = state
    return from_chunk_state(final)


def as_chunk_state(state: Tensor, groups: int) -> Tensor:
    """(n, nheads, d_state, headdim) -> (n, ngroups, d_state, heads of the group, headdim)."""
    return state.unflatten(1, (groups, -1)).transpose(2, 3)


def from_chunk_state(state: Tensor) -> Tensor:
    """The inverse of `as_chunk_state`, contiguous."""
    return state.transpose(2, 3).flatten(1, 2).contiguous()


class SideStates(NamedTuple):
    """A pass of the states of one direction, or of their cotangents, which go the other way."""

    chunks: Tensor
    """(M, ngroups, d_state, width): the state that enters each chunk."""
    ends: Tensor
    """Those behind the rows or documents, as `pass_states` returns them."""
    rightwards: bool
    entered: Tensor | None = None
    """The state that entered the part, (rows, nheads, d_state, width)."""


def entering_states(v: Tensor, setup: ScanSetup, side: int) -> SideStates:
    """The states of one direction; of a part those that begin in it."""
    scan, decay, scale = setup.sides[side], setup.decays[side], setup.scales[side]
    m, _, heads, headdim = v.shape
    groups, d_state = scan.k.shape[2:]
    local = v.new_empty(m, groups, d_state, heads // groups * headdim, dtype=setup.dtype)
    weight = decay.leave if scale is None else decay.leave * scale
    for at in chunk_blocks(setup):
        written = grouped_rows(v[at].to(setup.dtype) * weight[at].unsqueeze(-1), groups)
        torch.matmul(scan.k[at].to(setup.dtype).permute(0, 2, 3, 1), written, out=local[at])
    return pass_side(local, scan.initial_state, setup, side, not scan.reverse)


def pass_side(local: Tensor, boundary: Tensor | None, setup: ScanSetup, side: int, rightwards: bool) -> SideStates:
    """`pass_states` of one direction; in a part from the states of what begins in it."""
    if setup.part is not None:
        boundary = setup.part.own(boundary, rightwards)
    ends = pass_states(local, setup.decays[side].total, boundary, setup.layout, rightwards)
    return SideStates(local, ends, rightwards)


def send_states(setup: ScanSetup, side: ScanSide, states: SideStates, row: Tensor | None) -> Passing:
    """Sends the state behind the part, and a row for the next rank. side: as the scan was given it."""
    layout, ends = setup.layout, states.ends
    behind = ends[layout.edge_document(states.rightwards)] if layout.aligned else ends
    return Passing(setup.part, states.rightwards, behind, log_decays(side, layout.seqlen, behind), row)


def add_entering(setup: ScanSetup, side: int, states: SideStates, entering: Tensor) -> SideStates:
    """Adds what becomes of the state that enters the part (rows, nheads, d_state, width) to the others, in place."""
    layout, total, ends = setup.layout, setup.decays[side].total, states.ends
    chunks, document = slice(None), slice(None)
    if layout.aligned:
        # States do not go on into the next document.
        document = layout.edge_document(not states.rightwards)
        chunks = slice(layout.firsts[document.start], layout.lasts[document.start] + 1)
    passed = total[chunks].unflatten(0, (len(entering), -1))
    passed = (passed if states.rightwards else passed.flip(1)).cumprod(1)
    ends[document].addcmul_(entering, passed[:, -1, :, None, None])
    until = torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], 1)
    until = (until if states.rightwards else until.flip(1)).unflatten(2, (setup.groups, 1, -1, 1))
    into = states.chunks[chunks].unflatten(0, until.shape[:2]).unflatten(-1, (until.shape[-2], -1))
    into.addcmul_(as_chunk_state(entering, setup.groups).unsqueeze(1), until)
    return states._replace(entered=entering)


def scan_flops(
    v_shape: Sequence[int],
    q_shape: Sequence[int],
    directions: int,
    form: ScanForm,
    chunk_size: int | None,
    *,
    backward: bool,
) -> int:
    """Returns the FLOPs of one pass over v (batch, seqlen, nheads, headdim) with q (batch, seqlen, ngroups, d_state):
    two for each multiply-add of a matrix product, as FlopCounterMode counts.

    Counted are the products of the chunked form (the scores q k^T of each direction and group, chunk matrices times
    values, states written and read), but not what is done once per element (exponentials, masks, scales, the diagonal).
    A normaliser counts as one more column of values. "mult" and "concat" have a chunk matrix in each direction where
    "add" has one in all. The backward pass is counted with all that it computes again; masks save nothing.
    """
    batch, seqlen, heads, headdim = v_shape
    groups, d_state = q_shape[2:]
    chunk = chunk_size or default_scan_chunk(seqlen, d_state, headdim)
    width = headdim + form.normalize
    scores = directions * groups * chunk * d_state
    matrices = (1 if form.combine == "add" else directions) * heads * chunk * width
    # Written by each chunk and read by each token.
    states = directions * 2 * heads * d_state * width
    per_token = scores + matrices + states
    if backward:
        # Scores again, then dq and dk from them; dM and dv; states again and their cotangents, each read for
        # gradients of q or k, of v and of decays.
        again = per_token if form.combine == "mult" else 0
        per_token = 3 * scores + 2 * matrices + 3 * states + again
    return 2 * batch * seqlen * per_token
