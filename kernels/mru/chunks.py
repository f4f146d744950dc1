"""Makes the elements of state matrices from chunks of the tokens, with few parameters, as in mru-lm's first form
(December 2024).

A token's d_model numbers are nheads x o chunks of d_chunk; row i of a head's M is its chunk i times W_up[head]. The
elements of a construction are M row by row, or, where it takes a triangle, the strictly lower one of (M - M^T) /
sqrt(2), so that every weight counts and the elements are as large as those of M.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matmix.kernels.mru.constructions import TRIANGLES
from matmix.kernels.precision import outside_autocast, working


@outside_autocast
def elements_from_chunks(chunks: Tensor, w_up: Tensor, construction: str) -> Tensor:
    """(..., nheads, o, d_chunk) by (nheads, d_chunk, `element_columns`) -> (..., nheads, E), E as `state_elements`
    says, float32 (float64 for float64), differentiable."""
    chunks, w_up = working(chunks), working(w_up)
    order = chunks.shape[-2]
    matrices = torch.einsum("...hic,hcj->...hij", chunks, w_up.to(chunks.dtype)).flatten(-2)
    if construction not in TRIANGLES:
        return matrices
    below, above = _triangle(order, chunks.device)
    return (matrices.index_select(-1, below) - matrices.index_select(-1, above)) * math.sqrt(0.5)


def chunks_gradient(gradient: Tensor, chunks: Tensor, w_up: Tensor, construction: str) -> tuple[Tensor, Tensor]:
    """Gradients of chunks and weights, typed as these, from that of the elements."""
    given, weights = working(chunks), working(w_up)
    order = chunks.shape[-2]
    if construction in TRIANGLES:
        below, above = _triangle(order, chunks.device)
        whole = gradient.new_zeros(*gradient.shape[:-1], order**2)
        whole[..., below] = gradient * math.sqrt(0.5)
        whole[..., above] = gradient * -math.sqrt(0.5)
        gradient = whole
    gradient = gradient.unflatten(-1, (order, -1))
    dchunks = torch.einsum("...hij,hcj->...hic", gradient, weights.to(gradient.dtype))
    dw_up = torch.einsum("blhic,blhij->hcj", given, gradient)
    return dchunks.to(chunks.dtype), dw_up.to(w_up.dtype)


def _triangle(order: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places of the strictly lower triangle in a flat matrix, row by row, and those of their mirror images."""
    rows, columns = torch.tril_indices(order, order, -1, device=device)
    return rows * order + columns, columns * order + rows
