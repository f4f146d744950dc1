"""The small mixer matrix of each chunk, as the product of scores, decays and input scales."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.semiseparable.setup import ScanSetup


def chunk_scores(setup: ScanSetup, at: slice) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor, Tensor | None]:
    """q and k of each side, (m, ngroups, chunk, d_state), and the three factors of the chunk matrices:

    scores (m, ngroups, chunk, chunk), zero outside the masks; decays (m, nheads, chunk, chunk), at most 1
    everywhere; input scales, broadcastable to the decays, or None.
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
    # Outside the masks a difference of cumulative decays can be a large positive number: never exponentiate
    # that.
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
    return own.repeat_interleave(heads // setup.groups, 1), None if scale is None else scale[at].transpose(1, 2)


def undecayed_columns(matrix: Tensor, exclusive: bool, reverse: bool, sides: int) -> Tensor:
    """Column sums of the entries that hold no decay: (m, nheads, chunk, chunk) -> (m, nheads, chunk)."""
    if exclusive:
        column = matrix.diagonal(offset=1 if reverse else -1, dim1=-2, dim2=-1)
        return pad(column, (1, 0) if reverse else (0, 1))
    if reverse and sides == 2:
        return torch.zeros_like(matrix[..., 0])
    return matrix.diagonal(dim1=-2, dim2=-1)
