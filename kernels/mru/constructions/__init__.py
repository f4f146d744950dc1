"""Makes the state matrices X_t of the MRU from the elements that a projection of the token gives.

Each construction but "plain" maps zeros to the identity, has a memory-lean backward (its input or its output is kept,
nothing in between) that can be differentiated again, and works on float32 or float64 with autocast off. Sources: the
mru-lm repository's list of constructions, and its README for "plain"; Cayley 1846; Householder 1958, with vectors as
LAPACK's geqrf keeps them; Newton-Schulz: Higham, "Functions of Matrices", 2008, section 8.3.
"""

import torch

from matmix.kernels.functions import Function
from matmix.kernels.mru.constructions.orthogonal import (
    NEWTON_SCHULZ_STEPS,
    CayleyTransform,
    NearestOrthogonal,
    NearestOrthogonalToProduct,
    OrthogonalTimesUpper,
    UnitDeterminantProduct,
)


def bounded_rows(rows: torch.Tensor, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows along `dim` divided by the sums of their absolute values where these are above 1, and what they were divided
    by, 1 and above."""
    sizes = rows.abs().sum(dim, keepdim=True).clamp(min=1)
    return rows / sizes, sizes


def bounded_rows_gradient(
    bounded: torch.Tensor, sizes: torch.Tensor, gradient: torch.Tensor, dim: int = -1
) -> torch.Tensor:
    """The gradient of the rows that `bounded_rows` was given; that of rows whose sum is 1 is the identity's."""
    along = (gradient * bounded).sum(dim, keepdim=True) * (sizes > 1)
    return (gradient - bounded.sign() * along) / sizes


class AffineMap(Function):
    """X = [[A, 0], [B, I]] with k = o // 2: A (k x k) is I + M_1, each row divided by the sum of its absolute values
    where that is above 1, and B = M_2, for elements M = [M_1; M_2] (o x k). Keeps M only.

    In a product the lower left block is S_t = S_{t-1} A_t + B_t: a memory whose rows every token may rotate, permute
    and let fade (A) and add to (B). No row of A spreads more than it is given, so that the absolute values in a row of
    S sum to at most those of the B so far: states grow linearly at worst, whatever the elements and the length.
    """

    @staticmethod
    def factors(elements: torch.Tensor, order: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A, B, and the sizes (..., k, 1) that the rows of I + M_1 were divided by, 1 and above."""
        k = order // 2
        upper, lower = elements.unflatten(-1, (order, k)).split([k, order - k], dim=-2)
        a, sizes = bounded_rows(upper + torch.eye(k, dtype=elements.dtype, device=elements.device))
        return a, lower, sizes

    @staticmethod
    def forward(elements: torch.Tensor, order: int) -> torch.Tensor:
        a, b, _ = AffineMap.factors(elements, order)
        k = order // 2
        x = elements.new_zeros(*elements.shape[:-1], order, order)
        x[..., :k, :k], x[..., k:, :k] = a, b
        x.diagonal(dim1=-2, dim2=-1)[..., k:] = 1
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return AffineMap.gradient(ctx.saved_tensors[0], grad), None

    @staticmethod
    def gradient(elements: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the elements from that of X."""
        order = grad.shape[-1]
        a, _, sizes = AffineMap.factors(elements, order)
        of_a, of_b = grad[..., : order // 2].split([order // 2, order - order // 2], dim=-2)
        return torch.cat([bounded_rows_gradient(a, sizes, of_a), of_b], dim=-2).flatten(-2)


class ReflectionProduct(Function):
    """X = -H_1 H_2 ... H_o with H_k = I - 2 v_k v_k^T / |v_k|^2; keeps its input and X.

    v_k = e_k + elements below it, as LAPACK keeps them: the elements are the columns of the strictly lower triangle,
    given row by row like the Cayley transform's. No v_k can be 0, and all v_k = e_k give -I, hence the sign.
    H_k leaves rows and columns before k alone, so that the products only ever touch the trailing block.
    """

    @staticmethod
    def forward(elements: torch.Tensor, order: int) -> torch.Tensor:
        vectors, rates = ReflectionProduct.vectors(elements, order)
        x = vectors.new_zeros(order, order, vectors.shape[-1])
        x.diagonal().fill_(1)
        for k in reversed(range(order)):
            ReflectionProduct.reflect(x[k:, k:], vectors[k:, k], rates[k])
        return x.neg_().permute(2, 0, 1).contiguous().view(*elements.shape[:-1], order, order)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def vectors(elements: torch.Tensor, order: int) -> tuple[torch.Tensor, torch.Tensor]:
        """v (order, order, tokens), one a column, and 2 / |v|^2 (order, tokens); tokens are the fastest dimension."""
        flat = elements.reshape(-1, elements.shape[-1]).mT
        vectors = flat.new_zeros(order, order, flat.shape[1])
        rows, columns = torch.tril_indices(order, order, -1, device=elements.device)
        vectors[rows, columns] = flat
        vectors.diagonal().fill_(1)
        return vectors, 2 / vectors.square().sum(0)

    @staticmethod
    def reflect(block: torch.Tensor, vector: torch.Tensor, rate: torch.Tensor) -> None:
        """block (n, m, tokens) -= rate v (v^T block), in place."""
        row = (vector.unsqueeze(1) * block).sum(0).mul_(rate)
        block.addcmul_(vector.unsqueeze(1), row.unsqueeze(0), value=-1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # With K = G X^T - X G^T, skew, the gradient of v_1 is 2 K v_1 / |v_1|^2 =: y, and H_1 K H_1 = K + v y^T - y v^T
        # is the K of the product without H_1.
        elements, x = ctx.saved_tensors
        order = x.shape[-1]
        vectors, rates = ReflectionProduct.vectors(elements, order)
        skew = (grad @ x.mT).view(-1, order, order).permute(1, 2, 0).contiguous()
        skew = skew - skew.transpose(0, 1)
        grad_vectors = skew.new_zeros(vectors.shape)
        for k in range(order - 1):
            v = vectors[k:, k]
            y = (skew * v).sum(1) * rates[k]
            grad_vectors[k:, k] = y
            # Not in place: the sum above keeps K where it is to be differentiated again. Row and column k are done.
            skew = torch.addcmul(skew[1:, 1:], v[1:].unsqueeze(1), y[1:].unsqueeze(0))
            skew.addcmul_(y[1:].unsqueeze(1), v[1:].unsqueeze(0), value=-1)
        rows, columns = torch.tril_indices(order, order, -1, device=x.device)
        return grad_vectors[rows, columns].mT.reshape(elements.shape), None


CONSTRUCTIONS = ("affine", "identity_plus", "ldu", "cayley", "householder", "qr", "newton_schulz", "ldu_newton_schulz")
"""Ways to make a state matrix that is the identity where elements are zero."""

PLAIN = "plain"
"""The elements themselves, as mru-lm's README writes it."""

NORMED_CONSTRUCTIONS = ("cayley", "householder", "newton_schulz", "ldu_newton_schulz")
"""Constructions of spectral norm at most 1: their products keep it."""

BOUNDED_CONSTRUCTIONS = ("affine", *NORMED_CONSTRUCTIONS)
"""Constructions whose products cannot leave the range of numbers; affine ones grow linearly at worst."""


TRIANGLES = ("cayley", "householder")
"""Constructions whose elements are a strictly lower triangle."""


def element_columns(construction: str, order: int) -> int:
    """Columns of M, `order` rows of which hold the elements before a triangle is taken of them."""
    return order // 2 if construction == "affine" else order


def state_elements(construction: str, order: int) -> int:
    """Returns the number of elements per head and token that the construction takes."""
    if construction in TRIANGLES:
        return order * (order - 1) // 2
    return order * element_columns(construction, order)


def construction_products(construction: str) -> int:
    """Returns about what the construction costs, in products of order x order matrices."""
    steps = 2 * NEWTON_SCHULZ_STEPS
    return {PLAIN: 0, "qr": 2, "newton_schulz": steps, "ldu_newton_schulz": 1 + steps}.get(construction, 1)


def build_state_matrices(elements: torch.Tensor, construction: str, order: int) -> torch.Tensor:
    """(..., state_elements) -> (..., order, order).

    With the elements as a matrix M, row by row, or as its strictly lower triangle:
    "affine": [[A, 0], [B, I]], A = I + M's upper half with rows of absolute sum at most 1, B its lower half; M has o/2
        columns. Products grow linearly at worst, and forget.
    "identity_plus": I + M; nothing bounds it.
    "plain": M; nothing bounds it, and zeros give zeros.
    "ldu": (tril(M) + D)(triu(M) + D), D = exp((diag - mean diag) / 2); determinant 1, which does not bound products.
    "cayley": (I - S)^-1 (I + S), S skew with that lower triangle; orthogonal: products keep norm sqrt(order) for ever.
    "householder": -H_1 ... H_o, H_k the reflection along e_k + column k of that lower triangle; orthogonal.
    "qr": Q R, Q = cayley of M's lower triangle, R = triu(M) with exp(diag - mean diag) as its diagonal; determinant 1.
    "newton_schulz": I + M, scaled and brought near the orthogonal matrix next to it; spectral norm at most 1.
    "ldu_newton_schulz": ldu, scaled and brought near the orthogonal matrix next to it; spectral norm at most 1.
    """
    if construction == "affine":
        return AffineMap.apply(elements, order)
    if construction == "cayley":
        return CayleyTransform.apply(elements, order)
    if construction == "householder":
        return ReflectionProduct.apply(elements, order)
    matrices = elements.unflatten(-1, (order, order))
    if construction == PLAIN:
        return matrices
    if construction == "qr":
        return OrthogonalTimesUpper.apply(matrices)
    if construction == "ldu":
        return UnitDeterminantProduct.apply(matrices)
    if construction == "newton_schulz":
        return NearestOrthogonal.apply(matrices)
    if construction == "ldu_newton_schulz":
        return NearestOrthogonalToProduct.apply(matrices)
    assert construction == "identity_plus", construction
    return matrices + torch.eye(order, dtype=matrices.dtype, device=matrices.device)
