"""A state matrix of the MRU with determinant 1 from two triangles, and the orthogonal matrix near it."""

from __future__ import annotations

import torch


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


NEWTON_SCHULZ_STEPS = 10
"""Steps towards the orthogonal matrix. A small singular value grows by 1.5 a step, and near 1 the distance from 1 is
squared: with ten, all that start above 0.06 (order 8 with elements of size 0.3, more than training makes of them) end
at 1 to float32's rounding, and those that start lower stay below 1, which keeps products bounded all the same."""


class NearestOrthogonal(torch.autograd.Function):
    """Y / s brought towards its orthogonal polar factor by Z <- (3 Z - Z Z^T Z) / 2, s = sqrt(|Y|_1 |Y|_inf).

    s is at least the spectral norm, so that all singular values start in (0, 1] and stay there: whatever Y is, products
    of these matrices cannot grow. Keeps Y only; the backward goes through the same steps.
    """

    @staticmethod
    def forward(ctx, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(matrices)
        z = matrices / NearestOrthogonal.bound(matrices)
        for _ in range(NEWTON_SCHULZ_STEPS):
            z = NearestOrthogonal.step(z, z.mT @ z)
        return z

    @staticmethod
    def bound(matrices: torch.Tensor) -> torch.Tensor:
        """At least the spectral norm, (..., 1, 1); exactly 1 for the identity."""
        sizes = matrices.abs()
        return (sizes.sum(-1).amax(-1) * sizes.sum(-2).amax(-1)).sqrt()[..., None, None]

    @staticmethod
    def step(z: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
        """(3 Z - Z gram) / 2 with gram = Z^T Z."""
        return torch.lerp(z @ gram, z, 1.5)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (matrices,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = matrices.detach().requires_grad_()
            start = leaf / NearestOrthogonal.bound(leaf)
        states = [start.detach()]
        for _ in range(NEWTON_SCHULZ_STEPS - 1):
            states.append(NearestOrthogonal.step(states[-1], states[-1].mT @ states[-1]))
        while states:
            z = states.pop()
            gram, cross = z.mT @ z, z.mT @ grad
            # d(Z Z^T Z) = dZ gram + Z (dZ^T Z + Z^T dZ)
            grad = torch.lerp(grad @ gram + z @ (cross + cross.mT), grad, 1.5)
        (result,) = torch.autograd.grad(start, leaf, grad)
        return result
