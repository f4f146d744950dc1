"""The definition of the MRU mixer in float64, with which the fast forms are compared."""

from typing import Any

import torch
from torch import Tensor

from matmix.kernels.matrix_product.definition import matrix_product_definition
from matmix.kernels.mru.chunked import MixerInputs


def state_matrices_definition(elements: Tensor, construction: str, order: int) -> Tensor:
    """X (..., o, o) of the constructions that have a kernel, as `constructions.build_state_matrices` says them."""
    identity = torch.eye(order, dtype=torch.float64, device=elements.device)
    elements = elements.double()
    if construction == "cayley":
        skew = elements.new_zeros(*elements.shape[:-1], order, order)
        rows, columns = torch.tril_indices(order, order, -1, device=elements.device)
        skew[..., rows, columns] = elements
        skew = skew - skew.mT
        return torch.linalg.solve(identity - skew, identity + skew)
    if construction == "affine":
        k = order // 2
        m = elements.unflatten(-1, (order, k))
        a = m[..., :k, :] + identity[:k, :k]
        x = identity.repeat(*m.shape[:-2], 1, 1)
        sums = a.abs().sum(-1, keepdim=True)
        x[..., :k, :k] = a / torch.where(sums > 1, sums, 1.0)  # at 1 the gradient is that of the identity
        x[..., k:, :k] = m[..., k:, :]
        return x
    m = elements.unflatten(-1, (order, order))
    if construction == "identity_plus":
        return identity + m
    assert construction == "ldu", construction
    diagonal = m.diagonal(dim1=-2, dim2=-1)
    scale = torch.diag_embed((diagonal - diagonal.mean(-1, keepdim=True)).exp().sqrt())
    return (m.tril(-1) + scale) @ (m.triu(1) + scale)


def elements_definition(chunks: Tensor, w_up: Tensor, construction: str) -> Tensor:
    """Elements from a token's chunks, as `chunks.elements_from_chunks` says them."""
    m = torch.einsum("blhic,hcj->blhij", chunks.double(), w_up.double())
    if construction not in ("cayley", "householder"):
        return m.flatten(-2)
    rows, columns = torch.tril_indices(m.shape[-1], m.shape[-1], -1, device=m.device)
    return ((m - m.mT) / 2**0.5)[..., rows, columns]


def mru_mixer_definition(
    *tensors: Tensor, return_final_state: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """y_t = H_t w_down[head], H_t = H_{t-1} X_t; arguments as in `matmix.kernels.mru_mixer`."""
    elements, w_down, w_up, initial_state, cu_seqlens, construction, _ = MixerInputs(*tensors, **options)
    if w_up is not None:
        elements = elements_definition(elements, w_up, construction)
    x = state_matrices_definition(elements, construction, w_down.shape[1])
    h, final = matrix_product_definition(x, initial_state=initial_state, return_final_state=True, cu_seqlens=cu_seqlens)
    y = torch.einsum("blhij,hjc->blhic", h, w_down.double())
    return (y, final) if return_final_state else y
