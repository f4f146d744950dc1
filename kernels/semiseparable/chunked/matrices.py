"""The small mixer matrix of each chunk, as the product of scores, decays and input scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from matmix.kernels.semiseparable.chunked.setup import ScanSetup


class ChunkMatrices(NamedTuple):
    """Some chunks' matrices in factors: matrix = decays * weights, weights = scores * input scales."""

    pairs: list[tuple[Tensor, Tensor]]
    """q and k of each side, (m, ngroups, chunk, d_state)."""
    scores: list[Tensor]
    """q k^T of each side, (m, ngroups, chunk, chunk), with the side's mask."""
    decays: Tensor
    """(m, nheads, chunk, chunk), at most 1 everywhere; what exceeds that is part of the masks."""
    weights: Tensor
    """(m, nheads, chunk, chunk), or one head per group where no side has input scales."""


def chunk_matrices(setup: ScanSetup, at: slice, heads: int) -> ChunkMatrices:
    pairs, scores = [], []
    for number, side in enumerate(setup.sides):
        q = side.q[at].to(setup.dtype).transpose(1, 2).contiguous()
        k = side.k[at].to(setup.dtype).transpose(1, 2).contiguous()
        pairs.append((q, k))
        scores.append((q @ k.mT).mul_(block_mask(setup, at, number)))
    first, *second = setup.decays
    decays = first.log_matrix(at)
    if second:
        # Each side's is at most 0 in its own triangle and at least 0 in the other: their minimum takes each
        # triangle from its side.
        torch.minimum(decays, second[0].log_matrix(at), out=decays)
    # Outside the masks there can be a large positive number: never exponentiate that.
    decays.clamp_(max=0).exp_()
    if all(scale is None for scale in setup.scales):
        return ChunkMatrices(pairs, scores, decays, sum(scores[1:], scores[0]))
    weights = torch.zeros_like(decays)
    grouped = weights.unflatten(1, (setup.groups, -1))
    for side_scores, scale in zip(scores, setup.scales, strict=True):
        if scale is None:
            grouped += side_scores.unsqueeze(2)
        else:
            columns = scale_columns(scale, at).unflatten(1, (setup.groups, -1)).unsqueeze(-2)
            grouped.addcmul_(side_scores.unsqueeze(2), columns)
    return ChunkMatrices(pairs, scores, decays, weights)


def scale_columns(scale: Tensor, at: slice) -> Tensor:
    """Input scales of some chunks, (M, chunk, nheads) -> (m, nheads, chunk), contiguous."""
    return scale[at].transpose(1, 2).contiguous()


def block_mask(setup: ScanSetup, at: slice, number: int) -> Tensor:
    """One side's mask for some chunks, (m or 1, 1, chunk, chunk)."""
    mask = setup.masks[number]
    return (mask[at] if mask.shape[0] > 1 else mask).unsqueeze(1)


def multiply_by_group(x: Tensor, factor: Tensor) -> Tensor:
    """x (m, nheads, chunk, chunk) times a factor of each head or of each group of heads, in place."""
    if factor.shape[1] == x.shape[1]:
        return x.mul_(factor)
    x.unflatten(1, (factor.shape[1], -1)).mul_(factor.unsqueeze(2))
    return x


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
