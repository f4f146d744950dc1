import pytest
import torch

from matmix.kernels.mru.constructions import CONSTRUCTIONS, build_state_matrices, state_elements


def _definition(elements, construction, order):
    identity = torch.eye(order, dtype=elements.dtype)
    if construction == "cayley":
        skew = elements.new_zeros(*elements.shape[:-1], order, order)
        rows, columns = torch.tril_indices(order, order, -1)
        skew[..., rows, columns] = elements
        skew = skew - skew.mT
        return torch.linalg.solve(identity - skew, identity + skew)
    m = elements.unflatten(-1, (order, order))
    if construction == "identity_plus":
        return m + identity
    diagonal = m.diagonal(dim1=-2, dim2=-1)
    scale = torch.diag_embed((diagonal - diagonal.mean(-1, keepdim=True)).exp().sqrt())
    return (m.tril(-1) + scale) @ (m.triu(1) + scale)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("order", [2, 3, 8, 16])
def test_values_and_gradients_match_the_definition(construction, order):
    elements = torch.randn(5, 3, state_elements(construction, order)) * 0.5
    exact = elements.double().requires_grad_()
    ours = elements.clone().requires_grad_()
    x, expected = build_state_matrices(ours, construction, order), _definition(exact, construction, order)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=2e-6)
    cotangent = torch.randn_like(x)
    x.backward(cotangent)
    expected.backward(cotangent.double())
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_gradients_pass_gradcheck(construction):
    elements = torch.randn(2, state_elements(construction, 4), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda e: build_state_matrices(e, construction, 4), elements)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_zeros_give_the_identity(construction):
    x = build_state_matrices(torch.zeros(3, state_elements(construction, 5)), construction, 5)
    assert torch.equal(x, torch.eye(5).expand(3, 5, 5))


def test_ldu_has_determinant_one():
    x = build_state_matrices(torch.randn(20, 36, dtype=torch.float64), "ldu", 6)
    torch.testing.assert_close(torch.linalg.det(x), torch.ones(20, dtype=torch.float64))


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0, 1000.0])
def test_cayley_is_orthogonal_whatever_the_elements(size):
    order = 8
    x = build_state_matrices(torch.randn(500, state_elements("cayley", order)) * size, "cayley", order)
    assert ((x @ x.mT) - torch.eye(order)).abs().max() < 2e-6
