"""Constructions from factors: the Cayley transform, by itself and times a triangle, the product of two triangles, and
the orthogonal matrix next to that."""

from __future__ import annotations

from collections.abc import Callable

import torch

from matmix.kernels.functions import Function, lane_product

CACHED_TOKENS = 2048
"""Matrices that a CPU makes at a time: every pivot goes over all of them, which then lie in its cache."""


class CayleyTransform(Function):
    """Orthogonal X = (I - S)^-1 (I + S) = 2 (I - S)^-1 - I from the lower triangle of a skew S; keeps X only.

    The inverse is a Gauss-Jordan elimination without pivoting, with tokens as the fastest dimension: I - S has a
    positive definite symmetric part, so no pivot is below 1. In float64, because large elements cancel in it (in
    float32 orthogonality is off by 1e-4 where elements reach 10); still several times as fast as batched LAPACK.
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


class UnitDeterminantProduct(Function):
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
    def forward(matrices: torch.Tensor) -> torch.Tensor:
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


LARGEST_LOG = 16.0
"""A triangle whose largest element is above exp of this is scaled down to it: products of two and sums of squares stay
far inside float32's range, and usual matrices are left as they are."""


class NearestOrthogonal(Function):
    """I + M brought towards its orthogonal polar factor by `approach`; keeps M only, and the backward goes through the
    same steps."""

    @staticmethod
    def forward(matrices: torch.Tensor) -> torch.Tensor:
        return approach(NearestOrthogonal.start(matrices))

    @staticmethod
    def start(matrices: torch.Tensor) -> torch.Tensor:
        return matrices + torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (matrices,) = ctx.saved_tensors
        return approach_gradient(NearestOrthogonal.start(matrices), grad)


class NearestOrthogonalToProduct(Function):
    """L U, the product of determinant 1, brought towards its orthogonal polar factor by `approach`; keeps M only.

    What comes out does not change when L or U is multiplied by a number. So large ones are made smaller, D in its
    exponent where nothing overflows, and the gradient, which is that of any multiple, takes the numbers for constants.
    """

    @staticmethod
    def forward(matrices: torch.Tensor) -> torch.Tensor:
        (lower, _), (upper, _) = NearestOrthogonalToProduct.factors(matrices)
        return approach(lower @ upper)

    @staticmethod
    def factors(matrices: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """L and U, each with the number (..., 1, 1) that it was multiplied by, 1 unless it was large."""
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        exponents = (diagonal - diagonal.mean(-1, keepdim=True)) / 2
        factors = []
        for triangle in (matrices.tril(-1), matrices.triu(1)):
            with torch.no_grad():
                log_size = torch.maximum(triangle.abs().amax((-2, -1)).log(), exponents.amax(-1))
                excess = (log_size - LARGEST_LOG).clamp(min=0)[..., None]
                shrink = (-excess).exp()[..., None]
            factor = triangle * shrink
            factor.diagonal(dim1=-2, dim2=-1).copy_((exponents - excess).exp())
            factors.append((factor, shrink))
        return factors

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (matrices,) = ctx.saved_tensors
        (lower, shrink_lower), (upper, shrink_upper) = NearestOrthogonalToProduct.factors(matrices)
        grad = approach_gradient(lower @ upper, grad)
        grad_lower, grad_upper = grad @ upper.mT, lower.mT @ grad
        pairs = ((grad_lower, lower), (grad_upper, upper))
        on_diagonal = sum(g.diagonal(dim1=-2, dim2=-1) * f.diagonal(dim1=-2, dim2=-1) for g, f in pairs) / 2
        result = grad_lower.tril(-1).mul_(shrink_lower).add_(grad_upper.triu(1).mul_(shrink_upper))
        result.diagonal(dim1=-2, dim2=-1).copy_(on_diagonal - on_diagonal.mean(-1, keepdim=True))
        return result


LANES = 8
"""The largest order whose matrices a CPU multiplies beside each other, each number of all of them in a row: matrices of
4 x 4 take a quarter of the time that batched products of so small ones take."""


def approach(y: torch.Tensor) -> torch.Tensor:
    """Y / s brought towards its orthogonal polar factor by Z <- (3 Z - Z Z^T Z) / 2, s = sqrt(|Y|_1 |Y|_inf).

    s is at least the spectral norm, so that all singular values start in (0, 1] and stay there: whatever Y is, products
    of these matrices cannot grow.
    """
    return _in_lanes(_approach, y)


def approach_gradient(y: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of Y from that of `approach(Y)`."""
    return _in_lanes(_approach_gradient, y, grad)


def norm_bound(y: torch.Tensor, dims: tuple[int, int] = (-2, -1)) -> torch.Tensor:
    """At least the spectral norm of Y, whose rows and columns are in `dims`, which are 1 in the result; exactly 1 for
    the identity."""
    sizes, (rows, columns) = y.abs(), dims
    by_rows = sizes.sum(columns, keepdim=True).amax(rows, keepdim=True)
    by_columns = sizes.sum(rows, keepdim=True).amax(columns, keepdim=True)
    return by_rows.sqrt() * by_columns.sqrt()


def _in_lanes(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """A function of matrices (..., o, o) and of the dimensions of their rows and columns. Small ones it is given on a
    CPU as (o, o, n), as many at a time as lie in the cache."""
    shape, order = given[0].shape, given[0].shape[-1]
    if given[0].device.type != "cpu" or order > LANES:
        return function(*given, (-2, -1))
    parts = zip(*[x.reshape(-1, order, order).split(CACHED_TOKENS) for x in given], strict=True)
    made = [function(*[x.permute(1, 2, 0).contiguous() for x in part], (0, 1)).permute(2, 0, 1) for part in parts]
    return torch.cat(made).reshape(shape)


def _product(a: torch.Tensor, b: torch.Tensor, dims: tuple[int, int]) -> torch.Tensor:
    """A B."""
    return lane_product(a, b) if dims == (0, 1) else a @ b


def _approach(y: torch.Tensor, dims: tuple[int, int]) -> torch.Tensor:
    z = y / norm_bound(y, dims)
    for _ in range(NEWTON_SCHULZ_STEPS):
        z = _step(z, dims)
    return z


def _approach_gradient(y: torch.Tensor, grad: torch.Tensor, dims: tuple[int, int]) -> torch.Tensor:
    bound = norm_bound(y, dims)
    states = [y / bound]
    for _ in range(NEWTON_SCHULZ_STEPS - 1):
        states.append(_step(states[-1], dims))
    while states:
        z = states.pop()
        t = z.transpose(*dims)
        gram, cross = _product(t, z, dims), _product(t, grad, dims)
        # d(Z Z^T Z) = dZ gram + Z (dZ^T Z + Z^T dZ)
        turned = _product(grad, gram, dims) + _product(z, cross + cross.transpose(*dims), dims)
        grad = torch.lerp(turned, grad, 1.5)
    along = (grad * z).sum(dims, keepdim=True)
    return grad / bound - along * _norm_bound_gradient(y, dims)


def _norm_bound_gradient(y: torch.Tensor, dims: tuple[int, int]) -> torch.Tensor:
    """The gradient of log norm_bound(Y); rows, or columns, that are equally large share it."""
    sizes, weights = y.abs(), 0.0
    for dim in dims:
        sums = sizes.sum(dim, keepdim=True)
        largest = sums.amax(dims, keepdim=True)
        chosen = sums == largest
        weights = weights + chosen / (2 * largest * chosen.sum(dims, keepdim=True))
    return y.sign() * weights


def _step(z: torch.Tensor, dims: tuple[int, int]) -> torch.Tensor:
    """(3 Z - Z Z^T Z) / 2."""
    return torch.lerp(_product(z, _product(z.transpose(*dims), z, dims), dims), z, 1.5)
