"""The small mixer matrix of each chunk, as the product of scores, decays and input scales."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.semiseparable.decay import largest_sum
from matmix.kernels.semiseparable.setup import ScanSetup


def chunk_scores(setup: ScanSetup, at: slice) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor, Tensor | None]:
    """q and k of each side, (m, ngroups, chunk, d_state), and the three factors of the chunk matrices:

    scores (m, ngroups, chunk, chunk), zero outside the masks; decays (m, nheads, chunk, chunk),
    finite everywhere; input scales, broadcastable to the decays, or None.
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
    decay = decay.clamp_(max=largest_sum(setup.layout.chunk)).exp_()
    scale = None
    if any(s is not None for s in setup.scales):
        ones = decay.new_ones(1, 1, 1)
        given = [(ones if s is None else s[at]).transpose(1, 2).unsqueeze(2) for s in setup.scales]
        scale = given[0] if not second else torch.where(lower, *given)
    return pairs, scores, decay, scale


def own_terms(setup: ScanSetup, pairs: list[tuple[Tensor, Tensor]], heads: int) -> list[Tensor] | None:
    """What each side's own terms q_t . k_t count, (m, nheads, chunk) before input scales; None where the masks
    hold them or nothing does.
    """
    if not setup.own_weight:
        return None
    share = heads // setup.groups
    return [(q * k).sum(-1).mul_(setup.own_weight).repeat_interleave(share, 1) for q, k in pairs]


def token_factor(setup: ScanSetup, at: slice, own: list[Tensor] | None, diagonal: Tensor | None) -> Tensor | None:
    """What a token's value is multiplied by on its way into its own output, (m, nheads, chunk).

    diagonal (M, chunk, nheads).
    """
    factor = None if diagonal is None else diagonal[at].transpose(1, 2)
    for term, scale in zip(own or (), setup.scales, strict=False):
        term = term if scale is None else term * scale[at].transpose(1, 2)
        factor = term if factor is None else factor + term
    return factor


def undecayed_columns(matrix: Tensor, exclusive: bool, reverse: bool, sides: int) -> Tensor:
    """Column sums of the entries that hold no decay: (m, nheads, chunk, chunk) -> (m, nheads, chunk)."""
    if exclusive:
        column = matrix.diagonal(offset=1 if reverse else -1, dim1=-2, dim2=-1)
        return pad(column, (1, 0) if reverse else (0, 1))
    if sides == 2:
        return torch.zeros_like(matrix[..., 0])
    return matrix.diagonal(dim1=-2, dim2=-1)
