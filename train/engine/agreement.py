"""One norm for all copies of a model: what clips a step, or drops it, is the same number on every rank that holds one.

Gradients that an all-reduce has summed are the same bits on every copy, and so are norms of them that one program
computes. Where a device or a memory changes bits afterwards they are not: a copy that saw a NaN alone would drop its
step alone. The reduction below costs a few bytes and gives every copy the same norms, not finite if any copy's is not,
and says whether they differed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def agree_on_norms(
    norms: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of the copies' `norms`, a NaN above all, and whether what they computed alone, `own`, differed.

    norms and own: float32, (n,) and (m,), never negative; the second result: 0-dim, bool. group: the ranks with the
    copies. Called on all of them; the host does not wait.
    """
    # The bits of floats that are not negative are in the order of the floats, those of a NaN above infinity's. What a
    # maximum of floats makes of a NaN differs between communication libraries.
    bits, own = _bits(norms), _bits(own)
    largest = torch.cat([bits, own, -own])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    agreed, high, low = largest.split([bits.numel(), own.numel(), own.numel()])
    return agreed.to(torch.int32).view(torch.float32), (high != -low).any()


def _bits(norms: torch.Tensor) -> torch.Tensor:
    return norms.float().contiguous().view(torch.int32).to(torch.int64) & 0x7FFFFFFF
