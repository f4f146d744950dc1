"""The Cayley transform as a state matrix of the MRU, and its product with an upper triangle."""

from __future__ import annotations

import torch

from matmix.kernels.functions import Function

CACHED_TOKENS = 2048
"""Matrices that a CPU makes at a time: every pivot goes over all of them, which then lie in its cache."""


class CayleyTransform(Function):
    """Orthogonal X = (I - S)^-1 (I + S) = 2 (I - S)^-1 - I from the lower triangle of a skew S; keeps X only.

    The inverse is a Gauss-Jordan elimination without pivoting, with tokens as the fastest dimension: I - S
    has a positive definite symmetric part, so no pivot is below 1. In float64, because large elements cancel
    in it (in float32 orthogonality is off by 1e-4 where elements reach 10); still several times as fast as
    batched LAPACK.
    """

    @staticmethod
    def forward(elements: torch.Tensor, order: int) -> torch.Tensor:
        return CayleyTransform.transform(elements, order)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return CayleyTransform.gradient(ctx.saved_tensors[0], grad), None

    @staticmethod
    def transform(elements: torch.Tensor, order: int) -> torch.Tensor:
        """X from the elements."""
        if elements.device.type == "cpu" and elements.numel() > CACHED_TOKENS * elements.shape[-1]:
            parts = elements.reshape(-1, elements.shape[-1]).split(CACHED_TOKENS)
            x = torch.cat([CayleyTransform.transform(part, order) for part in parts])
            return x.view(*elements.shape[:-1], order, order)
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
        return a.to(elements.dtype).permute(2, 0, 1).contiguous().view(*elements.shape[:-1], order, order)

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


class OrthogonalTimesUpper(Function):
    """X = Q R: Q the Cayley transform of M's lower triangle, R = triu(M, 1) + D, D = exp(diag - mean diag), so that
    det X = 1; keeps M only and makes Q again in the backward."""

    @staticmethod
    def forward(matrices: torch.Tensor) -> torch.Tensor:
        orthogonal, upper, _ = OrthogonalTimesUpper.factors(matrices)
        return orthogonal @ upper

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def factors(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        order = matrices.shape[-1]
        rows, columns = torch.tril_indices(order, order, -1, device=matrices.device)
        orthogonal = CayleyTransform.apply(matrices.flatten(-2)[..., rows * order + columns], order)
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        scale = (diagonal - diagonal.mean(-1, keepdim=True)).exp()
        upper = matrices.triu(1)
        upper.diagonal(dim1=-2, dim2=-1).copy_(scale)
        return orthogonal, upper, scale

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (matrices,) = ctx.saved_tensors
        order = matrices.shape[-1]
        orthogonal, upper, scale = OrthogonalTimesUpper.factors(matrices)
        grad_lower = CayleyTransform.gradient(orthogonal, grad @ upper.mT)
        grad_upper = orthogonal.mT @ grad
        on_diagonal = grad_upper.diagonal(dim1=-2, dim2=-1) * scale
        result = grad_upper.triu(1)
        rows, columns = torch.tril_indices(order, order, -1, device=matrices.device)
        result[..., rows, columns] = grad_lower
        result.diagonal(dim1=-2, dim2=-1).copy_(on_diagonal - on_diagonal.mean(-1, keepdim=True))
        return result
