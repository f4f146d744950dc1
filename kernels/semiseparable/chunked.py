"""Semiseparable and quasiseparable scans in chunks, in PyTorch, with hand-written backward passes.

Within a chunk the mixer is a small matrix (scores q k^T times decays, lower triangle from the forward direction, upper
triangle from the backward one); between chunks only states of size d_state x headdim travel, one direction each way.
Nothing is flipped and no batch is doubled: the backward direction is the same arithmetic under the mirrored mask, and
Hydra's shift reads row t with q[t - 1] and the decays up to t - 1. The backward pass keeps only the inputs and computes
states and chunk matrices again.

Sources: "Transformers are SSMs" (arXiv 2405.21060), section 6, for the chunked form; "Hydra" (arXiv 2407.09941).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from matmix.kernels.documents import ChunkLayout, chunk_layout, shift_left, shift_right
from matmix.kernels.semiseparable.decay import SideDecay, side_decay, side_decay_backward


class ScanSide(NamedTuple):
    """One direction of a scan: q, k (batch, seqlen, ngroups, d_state), the rest as in `semiseparable_scan`."""

    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    input_scale: Tensor | None
    initial_state: Tensor | None
    reverse: bool


class ScanSetup(NamedTuple):
    """What forward and backward passes prepare alike."""

    layout: ChunkLayout
    dtype: torch.dtype
    groups: int
    exclusive: bool
    sides: tuple[ScanSide, ...]
    """With q and k as chunks (M, chunk, ngroups, d_state) and q already shifted."""
    scales: tuple[Tensor | None, ...]
    """Input scales as chunks (M, chunk, nheads)."""
    decays: tuple[SideDecay, ...]
    masks: tuple[Tensor, ...]
    """(M or 1, chunk, chunk), true where a side's scores count."""
    carries: tuple[bool, ...]
    """Whether any state enters a chunk of this side."""
    slab: int
    """Chunks worked on at a time, so that chunk matrices stay in the cache."""


def default_scan_chunk(seqlen: int, d_state: int, headdim: int) -> int:
    """Chunk length where the work inside chunks and the work on states balance; short sequences are one chunk."""
    if seqlen <= 128:
        return max(16, 1 << (seqlen - 1).bit_length())
    return 64


def set_up_scan(
    v: Tensor, sides: tuple[ScanSide, ...], exclusive: bool, cu_seqlens: Tensor | None, chunk_size: int | None,
    final_state: bool,
) -> ScanSetup:  # fmt: skip
    batch, seqlen, heads, headdim = v.shape
    groups, d_state = sides[0].q.shape[2:]
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    chunk = chunk_size or default_scan_chunk(seqlen, d_state, headdim)
    given = any(side.initial_state is not None for side in sides)
    layout = chunk_layout(batch, seqlen, chunk, cu_seqlens, aligned=given or final_state)

    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
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
        decays.append(
            side_decay(side.log_decay, layout, heads, side.reverse, exclusive, dtype, v.device, same)
        )
        mask = lower.mT if side.reverse else lower
        if exclusive or (side.reverse and len(sides) == 2):
            mask = mask & ~torch.eye(chunk, dtype=torch.bool, device=v.device)
        masks.append((mask & same) if same is not None else mask[None])
        carries.append(layout.per_row > 1 or side.initial_state is not None)
    # Chunk matrices of about 1 MB stay in a CPU core's cache; an accelerator wants large launches.
    budget = 1 << 20 if v.device.type == "cpu" else 1 << 28
    slab = max(1, budget // (heads * chunk * max(chunk, headdim) * dtype.itemsize))
    return ScanSetup(
        layout, dtype, groups, exclusive, tuple(chunks), tuple(scales), tuple(decays), tuple(masks), tuple(carries),
        slab,
    )  # fmt: skip


def slabs_of(setup: ScanSetup) -> list[slice]:
    count = setup.layout.rows * setup.layout.per_row
    return [slice(start, min(start + setup.slab, count)) for start in range(0, count, setup.slab)]


def grouped_rows(x: Tensor, groups: int) -> Tensor:
    """(m, chunk, nheads, headdim) -> (m, ngroups, chunk, heads of the group * headdim)."""
    m, chunk, heads, headdim = x.shape
    return x.reshape(m, chunk, groups, heads // groups * headdim).transpose(1, 2)


def ungrouped_rows(x: Tensor, heads: int) -> Tensor:
    """The inverse of `grouped_rows`."""
    m, groups, chunk, width = x.shape
    return x.transpose(1, 2).reshape(m, chunk, heads, width * groups // heads)


def pass_states(
    local: Tensor, total: Tensor, boundary: Tensor | None, layout: ChunkLayout, rightwards: bool
) -> Tensor | None:
    """Carry states over chunks, in place: entering_{c+1} = total_c entering_c + local_c.

    local (M, ngroups, d_state, width) holds what each chunk adds and is overwritten by the state that enters it;
    total (M, nheads); boundary (rows or documents, nheads, d_state, headdim) is the state at the start, None for zero.
    Returns the states at the end, shaped like `boundary` (in the dense layout of packed documents: None).
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


def entering_states(v: Tensor, setup: ScanSetup, side: int) -> tuple[Tensor | None, Tensor | None]:
    """State entering each chunk, (M, ngroups, d_state, width), and the state at the end, for one direction."""
    scan, decay, scale = setup.sides[side], setup.decays[side], setup.scales[side]
    m, _, heads, headdim = v.shape
    groups, d_state = scan.k.shape[2:]
    local = v.new_empty(m, groups, d_state, heads // groups * headdim, dtype=setup.dtype)
    weight = decay.leave if scale is None else decay.leave * scale
    for at in slabs_of(setup):
        written = grouped_rows(v[at].to(setup.dtype) * weight[at].unsqueeze(-1), groups)
        torch.matmul(scan.k[at].to(setup.dtype).permute(0, 2, 3, 1), written, out=local[at])
    final = pass_states(local, decay.total, scan.initial_state, setup.layout, not scan.reverse)
    return local, final


def chunk_scores(
    setup: ScanSetup, at: slice
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor, Tensor | None]:
    """q and k of each side, (m, ngroups, chunk, d_state), and the three factors of the chunk matrices:

    scores (m, ngroups, chunk, chunk), zero outside the masks; decays (m, nheads, chunk, chunk), at most 1 everywhere;
    input scales, broadcastable to the decays, or None.
    """
    pairs, scores = [], None
    for number, side in enumerate(setup.sides):
        q = side.q[at].to(setup.dtype).transpose(1, 2).contiguous()
        k = side.k[at].to(setup.dtype).transpose(1, 2).contiguous()
        pairs.append((q, k))
        mask = setup.masks[number]
        mask = (mask[at] if mask.shape[0] > 1 else mask).unsqueeze(1)
        own = (q @ k.mT).masked_fill_(~mask, 0)
        scores = own if scores is None else scores.add_(own)
    first, *second = setup.decays
    decay = first.log_matrix(at)
    if second:
        chunk = setup.layout.chunk
        lower = torch.ones(chunk, chunk, dtype=torch.bool, device=decay.device).tril()
        decay = torch.where(lower, decay, second[0].log_matrix(at))
    # Outside the masks a difference of cumulative decays can be a large positive number: never exponentiate that.
    decay = decay.clamp_(max=0).exp_()
    scale = None
    if any(s is not None for s in setup.scales):
        ones = decay.new_ones(1, 1, 1)
        given = [(ones if s is None else s[at]).transpose(1, 2).unsqueeze(2) for s in setup.scales]
        scale = given[0] if not second else torch.where(lower, *given)
    return pairs, scores, decay, scale


def own_products(setup: ScanSetup, pairs: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """q_t . k_t of the backward side, (m, ngroups, chunk), where both sides hold the diagonal; else None."""
    if len(pairs) == 1 or setup.exclusive:
        return None
    return (pairs[1][0] * pairs[1][1]).sum(-1)


def own_scale(setup: ScanSetup, at: slice, own: Tensor, heads: int) -> tuple[Tensor, Tensor | None]:
    """`own_products` per head, (m, nheads, chunk), and the backward side's input scale in that shape."""
    scale = setup.scales[1]
    return own.repeat_interleave(heads // setup.groups, 1), None if scale is None else scale[at].transpose(
        1, 2
    )


def scan_forward(
    v: Tensor, sides: tuple[ScanSide, ...], diagonal: Tensor | None, exclusive: bool, cu_seqlens: Tensor | None,
    chunk_size: int | None, final_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Output (as v) and, if asked for, the final state of the first side."""
    setup = set_up_scan(v, sides, exclusive, cu_seqlens, chunk_size, final_state)
    layout, dtype, groups = setup.layout, setup.dtype, setup.groups
    heads, headdim = v.shape[2:]
    chunks = layout.split(v)
    states: list[Tensor | None] = []
    final = None
    for number, carries in enumerate(setup.carries):
        wanted = final_state and number == 0
        entering, end = entering_states(chunks, setup, number) if carries or wanted else (None, None)
        states.append(entering)
        final = end if wanted else final
    diagonal = spread_heads(diagonal, layout, dtype)
    y = torch.empty_like(chunks, memory_format=torch.contiguous_format)
    for at in slabs_of(setup):
        values = chunks[at].to(dtype).transpose(1, 2).contiguous()
        pairs, scores, matrix, scale = chunk_scores(setup, at)
        matrix.unflatten(1, (groups, -1)).mul_(scores.unsqueeze(2))
        if scale is not None:
            matrix.mul_(scale)
        out = matrix @ values
        own = own_products(setup, pairs)
        if own is not None:
            own, side_scale = own_scale(setup, at, own, heads)
            out.addcmul_((own if side_scale is None else own * side_scale).unsqueeze(-1), values)
        if diagonal is not None:
            out.addcmul_(diagonal[at].transpose(1, 2).unsqueeze(-1), values)
        out = out.transpose(1, 2)
        for (q, _), entering, decay in zip(pairs, states, setup.decays, strict=True):
            if entering is not None:
                read = ungrouped_rows(q @ entering[at], heads)
                out = out + read.mul_(decay.enter[at].unsqueeze(-1))
        y[at] = out
    return layout.join(y), final


def spread_heads(x: Tensor | None, layout: ChunkLayout, dtype: torch.dtype) -> Tensor | None:
    """A per-head (nheads,) or per-token (batch, seqlen, nheads) factor as chunks (M, chunk, nheads)."""
    if x is None:
        return None
    if x.dim() == 1:
        return x.to(dtype).expand(layout.rows * layout.per_row, layout.chunk, -1)
    return layout.split(x).to(dtype)


class SideGradients(NamedTuple):
    q: Tensor
    k: Tensor
    log_decay: Tensor | None
    input_scale: Tensor | None
    initial_state: Tensor | None


def scan_backward(
    dy: Tensor, dfinal: Tensor | None, v: Tensor, sides: tuple[ScanSide, ...], diagonal: Tensor | None,
    exclusive: bool, cu_seqlens: Tensor | None, chunk_size: int | None,
) -> tuple[Tensor, tuple[SideGradients, ...], Tensor | None]:  # fmt: skip
    """Gradients of `scan_forward`: of v, of each side's tensors, of the diagonal."""
    setup = set_up_scan(v, sides, exclusive, cu_seqlens, chunk_size, dfinal is not None)
    layout, dtype, groups = setup.layout, setup.dtype, setup.groups
    heads, headdim = v.shape[2:]
    chunks, dout = layout.split(v), layout.split(dy)
    diagonal_chunks = spread_heads(diagonal, layout, dtype)
    count, chunk = chunks.shape[:2]

    carried = []
    for number, side in enumerate(setup.sides):
        dend = dfinal if number == 0 else None
        if not setup.carries[number] and dend is None:
            carried.append(None)
            continue
        entering, _ = entering_states(chunks, setup, number)
        leaving = torch.empty_like(entering)
        for at in slabs_of(setup):
            read = grouped_rows(dout[at].to(dtype) * setup.decays[number].enter[at].unsqueeze(-1), groups)
            torch.matmul(side.q[at].to(dtype).permute(0, 2, 3, 1), read, out=leaving[at])
        dinitial = pass_states(leaving, setup.decays[number].total, dend, layout, side.reverse)
        carried.append((entering, leaving, dinitial))

    def per_token(dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(count, chunk, heads, dtype=dtype, device=v.device)

    dv = torch.empty_like(chunks, memory_format=torch.contiguous_format)
    ddiagonal = None if diagonal is None else per_token()
    dq = [torch.empty_like(side.q, memory_format=torch.contiguous_format) for side in setup.sides]
    dk = [torch.empty_like(side.k, memory_format=torch.contiguous_format) for side in setup.sides]
    dscale = [None if scale is None else per_token() for scale in setup.scales]
    # Gradients of the decay exponents where rows read, where columns write, and where states enter and leave.
    wide = setup.decays[0].cumulate.dtype
    drow, dcol = [per_token(wide) for _ in sides], [per_token(wide) for _ in sides]
    dleave = [None if c is None else per_token() for c in carried]
    dtotal = [None if c is None else torch.zeros(count, heads, dtype=dtype, device=v.device) for c in carried]

    for at in slabs_of(setup):
        values = chunks[at].to(dtype)
        values_h = values.transpose(1, 2).contiguous()
        grad = dout[at].to(dtype)
        grad_h = grad.transpose(1, 2).contiguous()
        pairs, scores, matrix, scale = chunk_scores(setup, at)
        dmatrix = (grad_h @ values_h.mT).mul_(matrix)
        matrix.unflatten(1, (groups, -1)).mul_(scores.unsqueeze(2))
        if scale is not None:
            matrix.mul_(scale)
        dv_h = matrix.mT @ grad_h
        dscores = dmatrix if scale is None else torch.mul(dmatrix, scale, out=matrix)
        dscores = dscores.unflatten(1, (groups, -1)).sum(2)
        # From here on, the derivative by the exponent of each entry, without its input scale.
        dmatrix.unflatten(1, (groups, -1)).mul_(scores.unsqueeze(2))

        along = None
        own = own_products(setup, pairs)
        if own is not None or diagonal is not None:
            along = (grad_h * values_h).sum(-1)
        if diagonal is not None:
            dv_h.addcmul_(diagonal_chunks[at].transpose(1, 2).unsqueeze(-1), grad_h)
            ddiagonal[at] = along.transpose(1, 2)
        if own is not None:
            own_h, side_scale = own_scale(setup, at, own, heads)
            dv_h.addcmul_((own_h if side_scale is None else own_h * side_scale).unsqueeze(-1), grad_h)
            if side_scale is not None:
                dscale[1][at] += (along * own_h).transpose(1, 2)
            down = (along if side_scale is None else along * side_scale).unflatten(1, (groups, -1)).sum(2)

        dvalues = dv_h.transpose(1, 2)
        for number, (q, k) in enumerate(pairs):
            side, decay, side_scale = setup.sides[number], setup.decays[number], setup.scales[number]
            mask = setup.masks[number]
            mask = (mask[at] if mask.shape[0] > 1 else mask).unsqueeze(1)
            dside = dscores if len(pairs) == 1 else dscores * mask
            if len(pairs) == 1:
                dside = dscores.masked_fill_(~mask, 0)
            dq_g, dk_g = dside @ k, dside.mT @ q
            if own is not None and number == 1:
                dq_g.addcmul_(down.unsqueeze(-1), k)
                dk_g.addcmul_(down.unsqueeze(-1), q)
            # Entries next to the diagonal (on it, without shift) hold no decay: what they would add to rows and take
            # from columns cancels only to rounding, which is far too much where the other entries have decayed.
            exponents = dmatrix.triu(1 + exclusive) if side.reverse else dmatrix.tril(-1 - exclusive)
            if side_scale is not None:
                columns = exponents.sum(-2)
                columns += undecayed_columns(dmatrix, exclusive, side.reverse, len(pairs))
                dscale[number][at] += columns.transpose(1, 2)
                exponents *= side_scale[at].transpose(1, 2).unsqueeze(-2)
            # Row and column sums are subtracted from each other further on: the same numbers, summed exactly.
            exponents = exponents.to(decay.cumulate.dtype)
            drow[number][at] = exponents.sum(-1).transpose(1, 2)
            dcol[number][at] = exponents.sum(-2).transpose(1, 2)
            if carried[number] is not None:
                entering, leaving = carried[number][0][at], carried[number][1][at]
                read = ungrouped_rows(q @ entering, heads)
                weighted = grad * decay.enter[at].unsqueeze(-1)
                drow[number][at] += (read * weighted).sum(-1)
                dq_g += grouped_rows(weighted, groups) @ entering.mT
                written = ungrouped_rows(k @ leaving, heads)
                weight = decay.leave[at]
                along_state = (written * values).sum(-1) * weight
                if side_scale is not None:
                    dscale[number][at] += along_state
                    along_state = along_state * side_scale[at]
                    weight = weight * side_scale[at]
                dleave[number][at] = along_state
                dvalues = dvalues + written.mul_(weight.unsqueeze(-1))
                dk_g += grouped_rows(values * weight.unsqueeze(-1), groups) @ leaving.mT
                products = (entering * leaving).sum(2).unflatten(-1, (heads // groups, -1)).sum(-1)
                dtotal[number][at] = products.flatten(1) * decay.total[at]
            dq[number][at] = dq_g.transpose(1, 2)
            dk[number][at] = dk_g.transpose(1, 2)
        dv[at] = dvalues

    gradients = []
    for number, side in enumerate(sides):
        moved = layout.join(dq[number])
        if exclusive:
            moved = shift_right(moved, cu_seqlens) if side.reverse else shift_left(moved, cu_seqlens)
        dlog = None
        if side.log_decay is not None:
            dlog = side_decay_backward(
                setup.decays[number], drow[number], dcol[number], dleave[number], dtotal[number], exclusive
            )
            dlog = reduce_like(layout.join(dlog), side.log_decay)
        dinput = None if dscale[number] is None else layout.join(dscale[number]).to(side.input_scale.dtype)
        dinitial = None
        if side.initial_state is not None:
            dinitial = carried[number][2].to(side.initial_state.dtype)
        gradients.append(SideGradients(moved, layout.join(dk[number]), dlog, dinput, dinitial))
    if ddiagonal is not None:
        ddiagonal = reduce_like(layout.join(ddiagonal), diagonal)
    return layout.join(dv), tuple(gradients), ddiagonal


def undecayed_columns(matrix: Tensor, exclusive: bool, reverse: bool, sides: int) -> Tensor:
    """Column sums of the entries that hold no decay: (m, nheads, chunk, chunk) -> (m, nheads, chunk)."""
    if exclusive:
        column = matrix.diagonal(offset=1 if reverse else -1, dim1=-2, dim2=-1)
        return pad(column, (1, 0) if reverse else (0, 1))
    if reverse and sides == 2:
        return torch.zeros_like(matrix[..., 0])
    return matrix.diagonal(dim1=-2, dim2=-1)


def reduce_like(gradient: Tensor, like: Tensor) -> Tensor:
    """(batch, seqlen, nheads) summed to (nheads,) where the input was given per head."""
    return (gradient.sum((0, 1)) if like.dim() == 1 else gradient).to(like.dtype)


class SemiseparableFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, final_state, chunk_size
    ):
        ctx.save_for_backward(v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens)
        ctx.chunk_size = chunk_size
        ctx.set_materialize_grads(False)
        side = ScanSide(q, k, log_decay, input_scale, initial_state, False)
        return scan_forward(v, (side,), diagonal, False, cu_seqlens, chunk_size, final_state)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal):
        v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens = ctx.saved_tensors
        dy = torch.zeros_like(v) if dy is None else dy
        side = ScanSide(q, k, log_decay, input_scale, initial_state, False)
        dv, (dside,), ddiagonal = scan_backward(
            dy, dfinal, v, (side,), diagonal, False, cu_seqlens, ctx.chunk_size
        )
        tensors = (dv, dside.q, dside.k, dside.log_decay, dside.input_scale, ddiagonal, dside.initial_state)
        return *tensors, None, None, None


class QuasiseparableFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, qf, kf, qb, kb, af, ab, wf, wb, diagonal, hf, hb, cu_seqlens, shift, chunk_size):
        ctx.save_for_backward(v, qf, kf, qb, kb, af, ab, wf, wb, diagonal, hf, hb, cu_seqlens)
        ctx.options = shift, chunk_size
        sides = (ScanSide(qf, kf, af, wf, hf, False), ScanSide(qb, kb, ab, wb, hb, True))
        return scan_forward(v, sides, diagonal, shift, cu_seqlens, chunk_size, False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        v, qf, kf, qb, kb, af, ab, wf, wb, diagonal, hf, hb, cu_seqlens = ctx.saved_tensors
        shift, chunk_size = ctx.options
        sides = (ScanSide(qf, kf, af, wf, hf, False), ScanSide(qb, kb, ab, wb, hb, True))
        dv, (f, b), ddiagonal = scan_backward(dy, None, v, sides, diagonal, shift, cu_seqlens, chunk_size)
        scans = (f.q, f.k, b.q, b.k, f.log_decay, b.log_decay, f.input_scale, b.input_scale)
        return dv, *scans, ddiagonal, f.initial_state, b.initial_state, None, None, None


def semiseparable_chunked(
    v: Tensor,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    *,
    input_scale: Tensor | None = None,
    diagonal: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`semiseparable_scan` in PyTorch, without argument checks; see there."""
    y, final = SemiseparableFunction.apply(
        v, q, k, log_decay, input_scale, diagonal, initial_state, cu_seqlens, return_final_state, chunk_size
    )
    return (y, final) if return_final_state else y


def quasiseparable_chunked(
    v: Tensor,
    q_forward: Tensor,
    k_forward: Tensor,
    q_backward: Tensor,
    k_backward: Tensor,
    log_decay_forward: Tensor | None,
    log_decay_backward: Tensor | None,
    *,
    input_scale_forward: Tensor | None = None,
    input_scale_backward: Tensor | None = None,
    diagonal: Tensor | None = None,
    shift: bool = True,
    initial_state_forward: Tensor | None = None,
    initial_state_backward: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """`quasiseparable_scan` in PyTorch, without argument checks; see there."""
    return QuasiseparableFunction.apply(
        v, q_forward, k_forward, q_backward, k_backward, log_decay_forward, log_decay_backward,
        input_scale_forward, input_scale_backward, diagonal, initial_state_forward, initial_state_backward,
        cu_seqlens, shift, chunk_size,
    )  # fmt: skip
