"""Cuts a scan into directions, chunks, decays and masks, in the same way for forward and backward passes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from matmix.kernels.documents import ChunkLayout, chunk_layout, shift_left, shift_right
from matmix.kernels.semiseparable.chunked.decay import SideDecay, growth, side_decay
from matmix.kernels.semiseparable.form import ScanForm, ScanSide


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
    """Whether any state enters a chunk of this side."""
    chunks_at_once: int
    """Chunks worked on at a time, so that chunk matrices stay in the cache."""


def scan_dtype(v: Tensor) -> torch.dtype:
    """The dtype of sums and states."""
    return torch.float64 if v.dtype == torch.float64 else torch.float32


def default_scan_chunk(seqlen: int, d_state: int, headdim: int) -> int:
    """Chunk length where the work inside chunks and the work on states balance; short sequences are one
    chunk.
    """
    if seqlen <= 128:
        return max(16, 1 << (seqlen - 1).bit_length())
    return 64


def set_up_scan(
    v: Tensor,
    sides: tuple[ScanSide, ...],
    form: ScanForm,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    final_state: bool,
) -> ScanSetup:
    """Both directions of one linear scan: of `form`, only `shift` and `self_term` matter here."""
    batch, seqlen, heads, headdim = v.shape
    exclusive, both = form.shift, len(sides) == 2
    own_weight = 0.0 if exclusive or not both else 0.5 if form.self_term == "mean" else 1.0
    groups, d_state = sides[0].q.shape[2:]
    dtype = scan_dtype(v)
    chunk = chunk_size or default_scan_chunk(seqlen, d_state, headdim)
    given = any(side.initial_state is not None for side in sides)
    layout = chunk_layout(batch, seqlen, chunk, cu_seqlens, aligned=given or final_state)

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
        decays.append(side_decay(side.log_decay, layout, heads, side.reverse, exclusive, dtype, v.device, same))
        mask = lower.mT if side.reverse else lower
        if exclusive or both:
            mask = mask & ~torch.eye(chunk, dtype=torch.bool, device=v.device)
        masks.append(((mask & same) if same is not None else mask[None]) * grown)
        carries.append(layout.per_row > 1 or side.initial_state is not None)
    # A few MB of chunk matrices fit a CPU's caches and keep its cores busy; accelerators want more at once.
    budget = 3 << 20 if v.device.type == "cpu" else 1 << 28
    chunks_at_once = max(1, budget // (heads * chunk * max(chunk, headdim) * dtype.itemsize))
    return ScanSetup(
        layout,
        dtype,
        groups,
        exclusive,
        own_weight,
        tuple(chunks),
        tuple(scales),
        tuple(decays),
        tuple(masks),
        tuple(carries),
        chunks_at_once,
    )


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
