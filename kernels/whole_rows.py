"""Whole rows of some heads in place of parts of rows of all heads, for what knows no way to go on from part to part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matmix.kernels.context import Context, exchanged, gathered, share


def whole_boundaries(cu_seqlens: Tensor | None, seqlen: int, context: Context) -> Tensor | None:
    """Returns the boundaries of the documents of the whole row, (ndocs + 1,) int32, from those of this part of `seqlen`
    tokens. One byte for each token is gathered; waits for the device."""
    if cu_seqlens is None:
        return None
    inside = (cu_seqlens >= 0) & (cu_seqlens < seqlen)
    starts = torch.zeros(seqlen + 1, dtype=torch.uint8, device=cu_seqlens.device)
    starts[torch.where(inside, cu_seqlens, seqlen).long()] = 1
    whole = gathered(starts[:-1], 0, context)
    last = torch.full((1,), len(whole), dtype=torch.int32, device=whole.device)
    return torch.cat((whole.nonzero().squeeze(1).to(torch.int32), last))


def over_heads(
    run: Callable[..., Tensor], context: Context | None, cu_seqlens: Tensor | None, *parts: Tensor
) -> Tensor:
    """Runs `run` for whole rows: with a context, each rank does so for its share of the heads, between two all-to-alls.

    Args:
        run: called as run(*rows, cu_seqlens, heads), rows (B, all tokens, heads, width) of each part, the boundaries of
            all documents, and which heads, a slice; returns what is shaped like the rows of the first part. Not called
            where ranks are more than heads and none is left for this one.
        context: the ranks, each with an equal part of the tokens; None = the rows are whole.
        cu_seqlens: of this part.
        parts: (B, L, H, width) each, of one dtype.

    Returns: (B, L, H, width) shaped like the first part; with a context also typed so.
    """
    if context is None:
        return run(*parts, cu_seqlens, slice(None))
    like, (length, heads) = parts[0], parts[0].shape[1:3]
    rows = exchanged(torch.cat(parts, -1), 2, 1, context).split([part.shape[-1] for part in parts], -1)
    boundaries = whole_boundaries(cu_seqlens, length, context)
    y = run(*rows, boundaries, share(heads, context)).to(like.dtype) if rows[0].shape[2] else rows[0]
    return exchanged(y, 1, 2, context, joined=heads)


def over_heads_here(run: Callable[..., Tensor], context: None, cu_seqlens: Tensor | None, *parts: Tensor) -> Tensor:
    """`over_heads` without a context."""
    return run(*parts, cu_seqlens, slice(None))
