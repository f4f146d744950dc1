"""States between chunks: what each chunk adds to them, and the scan over all chunks in either direction."""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.documents import ChunkLayout
from matmix.kernels.semiseparable.chunked.setup import ScanSetup, chunk_blocks


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

    local (M, ngroups, d_state, width) holds what each chunk adds and is overwritten by the state that enters
    it; total (M, nheads); boundary (rows or documents, nheads, d_state, headdim) is the state at the start,
    None for zero. Returns the states at the end, shaped like `boundary` (in the dense layout of packed
    documents: None).
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
    """State entering each chunk, (M, ngroups, d_state, width), and the state at the end, for one
    direction.
    """
    scan, decay, scale = setup.sides[side], setup.decays[side], setup.scales[side]
    m, _, heads, headdim = v.shape
    groups, d_state = scan.k.shape[2:]
    local = v.new_empty(m, groups, d_state, heads // groups * headdim, dtype=setup.dtype)
    weight = decay.leave if scale is None else decay.leave * scale
    for at in chunk_blocks(setup):
        written = grouped_rows(v[at].to(setup.dtype) * weight[at].unsqueeze(-1), groups)
        torch.matmul(scan.k[at].to(setup.dtype).permute(0, 2, 3, 1), written, out=local[at])
    final = pass_states(local, decay.total, scan.initial_state, setup.layout, not scan.reverse)
    return local, final
