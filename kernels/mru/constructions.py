"""From the elements a projection gives to the state matrices X_t of the MRU.

Each construction maps zeros to the identity, has a memory-lean backward (only its input or its output is
kept), and works on float32 or float64 with autocast off. Sources: the mru-lm repository's list of
constructions; for the Cayley transform, Cayley 1846.
"""

from __future__ import annotations

import torch

CONSTRUCTIONS = ("identity_plus", "ldu", "cayley")
"""Known ways to make a state matrix."""


def state_elements(construction: str, order: int) -> int:
    """How many elements per head and token the construction takes."""
    return order * (order - 1) // 2 if construction == "cayley" else order * order


def build_state_matrices(elements: torch.Tensor, construction: str, order: int) -> torch.Tensor:
    """(..., state_elements) -> (..., order, order).

    "identity_plus": I + M; nothing bounds it. "ldu": (tril(M) + D)(triu(M) + D), D = exp((diag - mean diag) /
    2): determinant 1, which does not bound the norm of a product. "cayley": (I - S)^-1 (I + S), S skew with
    the elements as its lower triangle, row by row: orthogonal, so that products keep norm sqrt(order) for
    ever.
    """
    if construction == "cayley":
        return CayleyTransform.apply(elements, order)
    matrices = elements.unflatten(-1, (order, order))
    if construction == "ldu":
        return UnitDeterminantProduct.apply(matrices)
    assert construction == "identity_plus", construction
    return matrices + torch.eye(order, dtype=matrices.dtype, device=matrices.device)


class UnitDeterminantProduct(torch.autograd.Function):
    """(tril(M, -1) + D)(triu(M, 1) + D) with D = exp((diag - mean diag) / 2); keeps M only."""

    @staticmethod
    def factors(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        scale = ((diagonal - diagonal.mean(-1, keepdim=True)) / 2).exp()
        lower, upper = matrices.tril(-1), matrices.triu(1)
        lower.diagonal(dim1=-2, dim2=-1).copy_(scale)
        upper.diagonal(dim1=-2, dim2=-1).copy_(scale)
        return lower, upper, scale

    @staticmethod
    def forward(ctx, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(matrices)
        lower, upper, _ = UnitDeterminantProduct.factors(matrices)
        return lower @ upper

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return UnitDeterminantProduct.gradient(ctx.saved_tensors[0], grad)

    @staticmethod
    def gradient(matrices: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of M from that of X."""
        lower, upper, scale = UnitDeterminantProduct.factors(matrices)
        grad_lower, grad_upper = grad @ upper.mT, lower.mT @ grad
        on_diagonal = grad_lower.diagonal(dim1=-2, dim2=-1) + grad_upper.diagonal(dim1=-2, dim2=-1)
        on_diagonal = on_diagonal * scale / 2
        result = grad_lower.tril_(-1).add_(grad_upper.triu_(1))
        result.diagonal(dim1=-2, dim2=-1).copy_(on_diagonal - on_diagonal.mean(-1, keepdim=True))
        return result


class CayleyTransform(torch.autograd.Function):
    """Orthogonal X = (I - S)^-1 (I + S) = 2 (I - S)^-1 - I from the lower triangle of a skew S; keeps X only.

    The inverse is a Gauss-Jordan elimination without pivoting, with tokens as the fastest dimension: I - S
    has a positive definite symmetric part, so no pivot is below 1. In float64, because large elements cancel
    in it (in float32 orthogonality is off by 1e-4 where elements reach 10); still several times as fast as
    batched LAPACK.
    """

    @staticmethod
    def forward(ctx, elements: torch.Tensor, order: int) -> torch.Tensor:
        flat = elements.reshape(-1, elements.shape[-1]).mT.double()
        rows, columns = torch.tril_indices(order, order, -1, device=elements.device)
        a = flat.new_zeros(order, order, flat.shape[1])
        a[rows, columns] = -flat
        a[columns, rows] = flat
        a.diagonal().fill_(1)
        for pivot in range(order):
            inverse = a[pivot, pivot].reciprocal()
            row = a[pivot] * inverse
            row[pivot] = inverse
            column = a[:, pivot].clone()
            column[pivot] = 0
            a[:, pivot] = 0
            a.addcmul_(column.unsqueeze(1), row.unsqueeze(0), value=-1)
            a[pivot] = row
        a.mul_(2).diagonal().sub_(1)
        x = a.to(elements.dtype).permute(2, 0, 1).contiguous().view(*elements.shape[:-1], order, order)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return CayleyTransform.gradient(ctx.saved_tensors[0], grad), None

    @staticmethod
    def gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the elements from X and its gradient."""
        order = x.shape[-1]
        # (I - S)^-1 = (X + I) / 2 =: R, and dL/dS = 2 R^T G R^T.
        plus = x + torch.eye(order, dtype=x.dtype, device=x.device)
        grad_skew = plus.mT @ grad @ plus.mT
        rows, columns = torch.tril_indices(order, order, -1, device=x.device)
        grad_skew = (grad_skew - grad_skew.mT).flatten(-2)
        return grad_skew[..., rows * order + columns] / 2
