"""The state matrices of the MRU in forms that ONNX can express: nothing is written in place, nothing is solved."""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.mru.constructions import NEWTON_SCHULZ_STEPS
from matmix.kernels.mru.constructions.affine import AffineMap
from matmix.kernels.mru.constructions.ldu import NearestOrthogonal


def state_matrices_form(elements: Tensor, construction: str, order: int) -> Tensor:
    """(..., elements) -> (..., order, order), as `build_state_matrices` has them."""
    identity = torch.eye(order, dtype=elements.dtype, device=elements.device)
    if construction == "affine":
        rows, memory, _ = AffineMap.factors(elements, order)
        left = torch.cat((rows, memory), dim=-2)
        return torch.cat((left, identity[:, order // 2 :].expand(*left.shape[:-1], -1)), dim=-1)
    if construction in ("cayley", "householder"):
        lower = strictly_lower(elements, order)
        return cayley(lower, identity) if construction == "cayley" else reflections(lower, identity)
    m = elements.unflatten(-1, (order, order))
    if construction == "identity_plus":
        return identity + m
    below, above = identity.new_ones(order, order).tril(-1), identity.new_ones(order, order).triu(1)
    diagonal = (m * identity).sum(-1, keepdim=True)
    exponents = diagonal - diagonal.mean(-2, keepdim=True)
    if construction == "qr":
        return cayley(m * below, identity) @ (m * above + exponents.exp() * identity)
    scale = (exponents / 2).exp() * identity
    product = (m * below + scale) @ (m * above + scale)
    if construction == "ldu":
        return product
    assert construction == "ldu_newton_schulz", construction
    z = product / NearestOrthogonal.bound(product)
    for _ in range(NEWTON_SCHULZ_STEPS):
        z = 1.5 * z - 0.5 * (z @ (z.mT @ z))
    return z


def strictly_lower(elements: Tensor, order: int) -> Tensor:
    """Elements (..., order (order - 1) / 2) put below the diagonal, row by row, by a product with zeros and ones."""
    rows, columns = torch.tril_indices(order, order, -1)
    places = torch.zeros(elements.shape[-1], order * order, dtype=elements.dtype, device=elements.device)
    places[torch.arange(elements.shape[-1]), rows * order + columns] = 1
    return (elements @ places).unflatten(-1, (order, order))


def cayley(lower: Tensor, identity: Tensor) -> Tensor:
    """(I - S)^-1 (I + S), S = lower - lower^T, by elimination; as S is skew, no pivot is below 1."""
    order = identity.shape[-1]
    skew = lower - lower.mT
    rows = torch.cat((identity - skew, identity + skew), dim=-1)
    for k in range(order):
        pivot = rows[..., k : k + 1, :] / rows[..., k : k + 1, k : k + 1]
        here = identity[k].unsqueeze(-1)
        rows = here * pivot + (1 - here) * (rows - rows[..., k : k + 1] * pivot)
    return rows[..., order:]


def reflections(lower: Tensor, identity: Tensor) -> Tensor:
    """-H_1 ... H_o, H_k = I - 2 v v^T / |v|^2 with v = e_k + column k of `lower`."""
    x, vectors = -identity, lower + identity
    for k in reversed(range(identity.shape[-1])):
        v = vectors[..., k : k + 1]
        x = x - (2 / v.square().sum(-2, keepdim=True)) * v @ (v.mT @ x)
    return x
