"""Launches of the kernels that find the gradients of v, q, k, decays, scales and diagonal."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from matmix.kernels.launching import launch
from matmix.kernels.semiseparable.form import ScanForm, ScanSide
from matmix.kernels.semiseparable.fused.carry import States
from matmix.kernels.semiseparable.fused.pairs import pair_gradients
from matmix.kernels.semiseparable.fused.scan import Scan, heads_of_warp, one_or_two, per_token
from matmix.kernels.semiseparable.fused.sums import decay_gradients
from matmix.kernels.semiseparable.fused.vectors import vector_gradients


class Into(NamedTuple):
    """Tensors, strided as they may be, that the gradients of v, q and k are written into. All q and k share one set of
    strides. With shift, rows of q that nobody reads with are left as they are."""

    v: Tensor
    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]


class Found(NamedTuple):
    """The gradients of one pass."""

    v: Tensor
    sides: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
    """For each direction those of q, k (as they are), log-decays and input scales (float32, per token and head)."""
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
) -> Found:
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
    found = [
        (summed(dq, v.dtype, to_q), summed(dk, v.dtype, to_k), da, dw)
        for dq, dk, da, dw, (to_q, to_k) in zip(dqs, dks, das[: len(sides)], dws[: len(sides)], targets, strict=True)
    ]
    return Found(dv, found, along + along2 if halves and diagonal is not None else along)


def summed(parts: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
    """The sum of parts that several programs found, in a fixed order."""
    if into is None:
        return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)
    if parts.shape[0] > 1 or parts.dtype != dtype:
        into.copy_(parts.sum(0))
    return into
