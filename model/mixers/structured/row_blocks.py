"""Multiplies with matrices whose entries are sums of functions of a query and a key, one block of rows at a time,
without storing the whole matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from matmix.kernels.checks import transformed
from matmix.kernels.functions import outside_autocast

Entries = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(q (B, R, H, d), k (B, L, H, d), position of the first of the R rows) -> rows of the matrix (B, H, R, L)."""

BLOCK_NUMBERS = 1 << 22
"""Terms, one for each pair of tokens, head and channel, that are in memory at a time. On a CPU four times as many,
which its caches do not hold, took 2.8 times as long (cauchy_dd, 512 tokens); elsewhere 16 times as many are taken."""


@outside_autocast
def mix_in_row_blocks(entries: Entries, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """M v in float32 at least, for q and k (B or 1, L, H, d) and v (B, L, H, P).

    The terms of all pairs at once would need d times the memory of M; not even M is kept: the backward pass computes
    each block again.
    """
    exact = torch.promote_types(v.dtype, torch.float32)
    q, k, v = q.to(exact), k.to(exact), v.to(exact)
    numbers = BLOCK_NUMBERS if q.device.type == "cpu" else 16 * BLOCK_NUMBERS
    rows = max(1, numbers // (q.shape[0] * k.shape[1] * q.shape[2] * q.shape[3]))
    blocks = []
    for first in range(0, q.shape[1], rows):
        arguments = entries, q[:, first : first + rows], k, v, first
        if torch.is_grad_enabled() and not transformed():
            block = checkpoint(mix_rows, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            block = mix_rows(*arguments)
        blocks.append(block)
    return torch.cat(blocks, 1)


def mix_rows(entries: Entries, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
    """The rows of M v from `first` on, as many as q has."""
    return torch.einsum("bhts,bshp->bthp", entries(q, k, first), v)
