import math

import pytest
import torch
from nightly import each_value_once

from matmix.kernels.mru.constructions import (
    BOUNDED_CONSTRUCTIONS,
    CONSTRUCTIONS,
    NORMED_CONSTRUCTIONS,
    build_state_matrices,
    state_elements,
)
from matmix.kernels.mru.constructions.orthogonal import NEWTON_SCHULZ_STEPS
from matmix.model.mixers.mru import MRU, MRUConfig


def _cayley(elements, order):
    identity = torch.eye(order, dtype=elements.dtype)
    skew = _lower(elements, order)
    skew = skew - skew.mT
    return torch.linalg.solve(identity - skew, identity + skew)


def _lower(elements, order):
    matrices = elements.new_zeros(*elements.shape[:-1], order, order)
    rows, columns = torch.tril_indices(order, order, -1)
    matrices[..., rows, columns] = elements
    return matrices


def _newton_schulz(y):
    z = y / (y.abs().sum(-1).amax(-1) * y.abs().sum(-2).amax(-1)).sqrt()[..., None, None]
    for _ in range(NEWTON_SCHULZ_STEPS):
        z = (3 * z - z @ z.mT @ z) / 2
    return z


def _definition(elements, construction, order):
    identity = torch.eye(order, dtype=elements.dtype)
    if construction == "cayley":
        return _cayley(elements, order)
    if construction == "householder":
        vectors = _lower(elements, order) + identity
        return -torch.linalg.householder_product(vectors, 2 / vectors.square().sum(-2))
    if construction == "affine":
        m, k = elements.unflatten(-1, (order, order // 2)), order // 2
        a = m[..., :k, :] + identity[:k, :k]
        a = a / torch.maximum(a.abs().sum(-1, keepdim=True), torch.ones(()))
        right = torch.cat([torch.zeros_like(identity[:k, k:]), identity[k:, k:]]).expand(*m.shape[:-2], -1, -1)
        return torch.cat([torch.cat([a, m[..., k:, :]], -2), right], -1)
    m = elements.unflatten(-1, (order, order))
    if construction == "identity_plus":
        return m + identity
    if construction == "newton_schulz":
        return _newton_schulz(m + identity)
    diagonal = m.diagonal(dim1=-2, dim2=-1)
    scale = torch.diag_embed((diagonal - diagonal.mean(-1, keepdim=True)).exp())
    if construction == "qr":
        rows, columns = torch.tril_indices(order, order, -1)
        return _cayley(m[..., rows, columns], order) @ (m.triu(1) + scale)
    ldu = (m.tril(-1) + scale.sqrt()) @ (m.triu(1) + scale.sqrt())
    return ldu if construction == "ldu" else _newton_schulz(ldu)


@pytest.mark.parametrize(("construction", "order"), each_value_once(CONSTRUCTIONS, [3, 32, 4, 8, 16, 2]))
def test_values_and_gradients_match_the_definition(construction, order):
    elements = torch.randn(5, 3, state_elements(construction, order)) * 0.5
    exact = elements.double().requires_grad_()
    ours = elements.clone().requires_grad_()
    x, expected = build_state_matrices(ours, construction, order), _definition(exact, construction, order)
    # Up to 32 sums of 32 terms behind each other, with 2^-24 of rounding in each, of numbers of about 1 to 10.
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn_like(x)
    x.backward(cotangent)
    expected.backward(cotangent.double())
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_gradients_pass_gradcheck(construction):
    elements = torch.randn(2, state_elements(construction, 4), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda e: build_state_matrices(e, construction, 4), elements)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_second_derivatives_pass_gradgradcheck(construction):
    elements = torch.randn(2, state_elements(construction, 3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda e: build_state_matrices(e, construction, 3), elements)


def test_zeros_give_the_identity():
    for construction in CONSTRUCTIONS:
        x = build_state_matrices(torch.zeros(3, state_elements(construction, 5)), construction, 5)
        assert torch.equal(x, torch.eye(5).expand(3, 5, 5)), construction


@pytest.mark.parametrize("construction", ["ldu", "qr"])
def test_determinants_are_one(construction):
    x = build_state_matrices(torch.randn(20, 36, dtype=torch.float64), construction, 6)
    torch.testing.assert_close(torch.linalg.det(x), torch.ones(20, dtype=torch.float64))


@pytest.mark.parametrize(
    ("construction", "size"), each_value_once(["cayley", "householder"], [1.0, 30.0, 1000.0, 0.01])
)
def test_orthogonal_whatever_the_elements(construction, size):
    order = 8
    x = build_state_matrices(torch.randn(500, state_elements(construction, order)) * size, construction, order)
    assert ((x @ x.mT) - torch.eye(order)).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("construction", "size", "order"),
    each_value_once(NORMED_CONSTRUCTIONS, [0.01, 1.0, 10.0, 30.0, 1e3, 1e4], [8, 32, 2]),
)
def test_normed_constructions_are_bounded_and_have_finite_gradients(construction, size, order):
    elements = (torch.randn(200, state_elements(construction, order)) * size).requires_grad_()
    x = build_state_matrices(elements, construction, order)
    (grad,) = torch.autograd.grad(x, elements, torch.randn_like(x))
    # Float32 leaves it open to 32 reflections, or sums of 32 terms, with 2^-24 of rounding in each: 2e-6.
    assert torch.linalg.matrix_norm(x.double(), 2).max() < 1 + 2e-5
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("construction", "size", "order"), each_value_once(BOUNDED_CONSTRUCTIONS, [0.01, 1.0, 100.0, 1e4], [2, 5, 8])
)
def test_products_of_bounded_constructions_grow_linearly_at_worst(construction, size, order):
    tokens = 1000
    elements = torch.randn(tokens, 4, state_elements(construction, order)) * size
    product = torch.eye(order).expand(4, -1, -1)
    for x in build_state_matrices(elements, construction, order):
        product = product @ x
    # Rows of B, absolute, sum to order / 2 elements at most; the factor is for rounding.
    largest = math.sqrt(order) + tokens * order * float(elements.abs().max())
    assert float(product.abs().sum(-1).max()) <= 1.01 * largest


def test_rows_of_an_affine_map_spread_no_more_than_they_are_given():
    order = 9
    x = build_state_matrices(torch.randn(300, state_elements("affine", order)) * 3, "affine", order)
    assert x[:, :4, :4].abs().sum(-1).max() < 1 + 1e-6
    assert torch.equal(x[:, :, 4:], torch.eye(order)[:, 4:].expand(300, -1, -1))


@pytest.mark.parametrize(("order", "size"), each_value_once([2, 8, 32], [30.0, 10.0]))
def test_newton_schulz_of_large_triangles_matches_the_definition(order, size):
    """They are scaled down first, which must not show in values or gradients."""
    torch.manual_seed(0)  # The seldom matrix whose L U cancels is as far off as float32 puts it.
    elements = torch.randn(50, order * order) * size
    exact = elements.double().requires_grad_()
    ours = elements.clone().requires_grad_()
    x = build_state_matrices(ours, "ldu_newton_schulz", order)
    expected = _definition(exact, "ldu_newton_schulz", order)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-4)
    cotangent = torch.randn_like(x)
    x.backward(cotangent)
    expected.backward(cotangent.double())
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("near", "construction", "order", "size"),
    [
        *[("ldu", "ldu_newton_schulz", *case) for case in ((4, 0.3), (8, 0.2), (16, 0.1), (32, 0.05))],
        # No singular value is far below 1: the largest of M are about 2 size sqrt(order).
        *[("identity_plus", "newton_schulz", *case) for case in ((4, 0.15), (8, 0.1), (16, 0.08), (32, 0.05))],
    ],
)
def test_newton_schulz_ends_at_the_polar_factor_of_usual_matrices(near, construction, order, size):
    elements = torch.randn(200, order * order, dtype=torch.float64) * size
    u, _, vh = torch.linalg.svd(build_state_matrices(elements, near, order))
    x = build_state_matrices(elements.float(), construction, order)
    torch.testing.assert_close(x.double(), u @ vh, rtol=0, atol=1e-4)


@pytest.mark.parametrize("construction", ["cayley", "qr"])
def test_many_tokens_are_what_each_is_by_itself(construction):
    """Up to rounding: libraries solve and multiply many matrices by other routines than one. That is 2^-24 in each of
    some dozen sums, enlarged by the systems' condition, of about 10; a wrong token's matrix is off by 1."""
    elements = torch.randn(3, 2500, state_elements(construction, 4))
    x = build_state_matrices(elements, construction, 4)
    for token in ((1, 2049), (2, -1)):
        alone = build_state_matrices(elements[token], construction, 4)
        torch.testing.assert_close(x[token], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("construction", "form"),
    [
        *((name, "dense") for name in CONSTRUCTIONS),
        ("identity_plus", "chunked"),
        ("cayley", "chunked"),
    ],
)
def test_layers_compile_as_a_whole(construction, form):
    options = MRUConfig(order=4, construction=construction, input=form)
    layer = MRU(32, options, causal=True, max_seqlen=16, output_std=0.02)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 7, 32, requires_grad=True)
    found = []
    for form in (layer, compiled):
        y = form(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
