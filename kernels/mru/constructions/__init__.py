"""Makes the state matrices X_t of the MRU from the elements that a projection of the token gives.

Each construction maps zeros to the identity, has a memory-lean backward (its input or its output is kept, nothing in
between) that can be differentiated again, and works on float32 or float64 with autocast off. Sources: the mru-lm
repository's list of constructions; Cayley 1846; Householder 1958, with vectors as LAPACK's geqrf keeps them;
Newton-Schulz: Higham, "Functions of Matrices", 2008, section 8.3.
"""

from __future__ import annotations

import torch

from matmix.kernels.mru.constructions.affine import AffineMap
from matmix.kernels.mru.constructions.cayley import CayleyTransform, OrthogonalTimesUpper
from matmix.kernels.mru.constructions.householder import ReflectionProduct
from matmix.kernels.mru.constructions.ldu import NEWTON_SCHULZ_STEPS, NearestOrthogonal, UnitDeterminantProduct

CONSTRUCTIONS = ("affine", "identity_plus", "ldu", "cayley", "householder", "qr", "ldu_newton_schulz")
"""Known ways to make a state matrix."""

NORMED_CONSTRUCTIONS = ("cayley", "householder", "ldu_newton_schulz")
"""Those of spectral norm at most 1: products stay there."""

BOUNDED_CONSTRUCTIONS = ("affine", *NORMED_CONSTRUCTIONS)
"""Those whose products cannot leave the range of numbers; of affine ones they grow linearly at worst."""


TRIANGLES = ("cayley", "householder")
"""Those whose elements are a strictly lower triangle."""


def element_columns(construction: str, order: int) -> int:
    """Columns of M, `order` rows of which hold the elements before a triangle is taken of them."""
    return order // 2 if construction == "affine" else order


def state_elements(construction: str, order: int) -> int:
    """How many elements per head and token the construction takes."""
    if construction in TRIANGLES:
        return order * (order - 1) // 2
    return order * element_columns(construction, order)


def construction_products(construction: str) -> int:
    """What the construction costs, in products of order x order matrices, about."""
    return {"qr": 2, "ldu_newton_schulz": 1 + 2 * NEWTON_SCHULZ_STEPS}.get(construction, 1)


def build_state_matrices(elements: torch.Tensor, construction: str, order: int) -> torch.Tensor:
    """(..., state_elements) -> (..., order, order).

    With the elements as a matrix M, row by row, or as its strictly lower triangle:
    "affine": [[A, 0], [B, I]], A = I + M's upper half with rows of absolute sum at most 1, B its lower half; M has o/2
        columns. Products grow linearly at worst, and forget.
    "identity_plus": I + M; nothing bounds it.
    "ldu": (tril(M) + D)(triu(M) + D), D = exp((diag - mean diag) / 2); determinant 1, which does not bound products.
    "cayley": (I - S)^-1 (I + S), S skew with that lower triangle; orthogonal: products keep norm sqrt(order) for ever.
    "householder": -H_1 ... H_o, H_k the reflection along e_k + column k of that lower triangle; orthogonal.
    "qr": Q R, Q = cayley of M's lower triangle, R = triu(M) with exp(diag - mean diag) as its diagonal; determinant 1.
    "ldu_newton_schulz": ldu, scaled and brought near the orthogonal matrix next to it; spectral norm at most 1.
    """
    if construction == "affine":
        return AffineMap.apply(elements, order)
    if construction == "cayley":
        return CayleyTransform.apply(elements, order)
    if construction == "householder":
        return ReflectionProduct.apply(elements, order)
    matrices = elements.unflatten(-1, (order, order))
    if construction == "qr":
        return OrthogonalTimesUpper.apply(matrices)
    if construction == "ldu":
        return UnitDeterminantProduct.apply(matrices)
    if construction == "ldu_newton_schulz":
        return NearestOrthogonal.apply(matrices)
    assert construction == "identity_plus", construction
    return matrices + torch.eye(order, dtype=matrices.dtype, device=matrices.device)
