"""Launches of the kernels that find the gradients of q, k, decays, scales and diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.launching import launch
from matmix.kernels.semiseparable.form import ScanForm, ScanSide
from matmix.kernels.semiseparable.fused.carry import States
from matmix.kernels.semiseparable.fused.pairs import pair_gradients
from matmix.kernels.semiseparable.fused.scan import Scan, one_or_two, per_token
from matmix.kernels.semiseparable.fused.through import state_gradients


def vector_gradients(
    scan: Scan,
    v: Tensor,
    dys: list[Tensor],
    drow_sum: Tensor | None,
    sides: tuple[ScanSide, ...],
    diagonal: bool,
    form: ScanForm,
    entering: States | None,
    leaving: States | None,
) -> tuple[list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]], Tensor | None]:
    """For each direction gradients of q, k (as they are), log-decays and input scales (float32, per token and head);
    and dy . v per token and head where there is a diagonal."""
    two, carried, slots = len(sides) == 2, entering is not None, scan.slots(scan.chunk)
    first, second, self_weight = one_or_two(sides, form)
    # Heads in one program share the last products; fewer of them where that would leave the GPU idle.
    wanted = max(1, slots * scan.heads // scan.programs)
    heads = max(d for d in range(1, scan.share + 1) if scan.share % d == 0 and d <= wanted)
    blocks = scan.share // heads
    add = carried and blocks == 1
    shape, factors = first.q.shape, v.shape[:3]

    def vectors(parts: int, dtype: torch.dtype, zero: bool) -> Tensor:
        # With shift nobody reads for a document's last (or first) token.
        return (torch.zeros if zero else torch.empty)((parts, *shape), dtype=dtype, device=v.device)

    def factor(wanted: bool, parts: int = 1) -> Tensor | None:
        return torch.empty((parts, *factors), dtype=torch.float32, device=v.device) if wanted else None

    parts = blocks * (2 if carried and not add else 1)
    pair_dtype = v.dtype if parts == 1 and not carried else torch.float32
    dqs = [vectors(parts, pair_dtype, form.shift and not add) for _ in sides]
    dks = [vectors(parts, pair_dtype, False) for _ in sides]
    das = [factor(side.log_decay is not None) for side in (first, second)]
    dws = [factor(side.input_scale is not None) for side in (first, second)]
    halves = two and form.combine == "concat"
    along, along2 = factor(diagonal), factor(diagonal and halves)
    block_n, n_blocks, block_p, p_blocks = scan.blocks(scan.config.pair_block)
    launch(
        pair_gradients, (slots, scan.heads // heads),
        dqs[0], dks[0], dqs[-1], dks[-1], *dqs[0].stride()[:4], das[0], dws[0], das[1], dws[1], along, along2,
        dys[0], dys[-1], *dys[0].stride()[:3], v, *v.stride()[:3],
        first.q, *first.q.stride()[:3], first.k, *first.k.stride()[:3],
        second.q, *second.q.stride()[:3], second.k, *second.k.stride()[:3],
        *per_token(first.log_decay), *per_token(second.log_decay),
        *per_token(first.input_scale), *per_token(second.input_scale), *per_token(drow_sum),
        scan.cu_seqlens, scan.documents, scan.seqlen, scan.per_row(scan.chunk), scan.heads, scan.share, scan.d_state,
        scan.headdim, self_weight,
        num_warps=scan.config.pair_warps, num_stages=scan.config.stages,
        TWO=two, REVERSE=first.reverse, SHIFT=form.shift, GATED1=das[0] is not None, GATED2=das[1] is not None,
        SCALED1=dws[0] is not None, SCALED2=dws[1] is not None, DIAGONAL=diagonal, HALVES=halves,
        NORMALIZE=drow_sum is not None, PACKED=scan.cu_seqlens is not None, CHUNK=scan.chunk, HEADS=heads,
        BLOCK_N=block_n, N_BLOCKS=n_blocks, BLOCK_P=block_p, P_BLOCKS=p_blocks,
        PRECISION=scan.precision, EXACT=scan.config.itemsize == 4,
    )  # fmt: skip

    found = []
    block_n, n_blocks, block_p, p_blocks = scan.blocks(scan.config.state_gradient_block)
    for number, side in enumerate(sides):
        dq, dk, da, dw = dqs[number], dks[number], das[number], dws[number]
        if carried:
            into_q = vectors(1, v.dtype, form.shift) if add else dq[blocks:]
            into_k = vectors(1, v.dtype, False) if add else dk[blocks:]
            into_a, into_w = factor(da is not None, n_blocks), factor(dw is not None, n_blocks)
            launch(
                state_gradients, (slots, scan.heads // heads, n_blocks),
                into_q, into_k, *into_q.stride()[:4], dq if add else None, dk if add else None,
                into_a, into_w, factors.numel(), da, dw,
                dys[number], *dys[number].stride()[:3], v, *v.stride()[:3],
                side.q, *side.q.stride()[:3], side.k, *side.k.stride()[:3],
                *per_token(side.log_decay), *per_token(side.input_scale), *per_token(drow_sum),
                entering.states, entering.vectors, leaving.states, leaving.vectors,
                scan.cu_seqlens, scan.documents, scan.seqlen, scan.per_row(scan.chunk), scan.heads, scan.share,
                scan.d_state, scan.headdim, number,
                num_warps=scan.config.state_gradient_warps, num_stages=scan.config.stages,
                directions=len(sides), REVERSE=side.reverse, SHIFT=form.shift, GATED=da is not None,
                SCALED=dw is not None, ADD=add, NORMALIZE=drow_sum is not None, PACKED=scan.cu_seqlens is not None,
                CHUNK=scan.chunk, HEADS=heads, BLOCK_N=block_n, BLOCK_P=block_p, P_BLOCKS=p_blocks,
                PRECISION=scan.precision,
            )  # fmt: skip
            dq, dk, da, dw = into_q if add else dq, into_k if add else dk, into_a, into_w
        found.append((summed(dq, v.dtype), summed(dk, v.dtype), summed(da), summed(dw)))
    along = summed(along)
    return found, along + summed(along2) if halves and diagonal else along


def summed(parts: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """The sum of parts that several programs found, in a fixed order."""
    if parts is None:
        return None
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)
