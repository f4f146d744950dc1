"""The MRU with addresses: against its equations token by token, as a product of affine matrices, and what bounds it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from matmix.kernels import matrix_product_scan
from matmix.kernels.mru.constructions.orthogonal import norm_bound
from matmix.model.initialization import initialize
from matmix.model.mixers.matrix_memory import MatrixMemory, MatrixMemoryConfig
from matmix.model.mixers.mru import faded

D_MODEL = 32


def _layer(dtype=torch.float32, **options) -> MatrixMemory:
    config = MatrixMemoryConfig(**options)
    MatrixMemory.check(D_MODEL, config)
    layer = MatrixMemory(D_MODEL, config, causal=True, max_seqlen=64, output_std=0.1)
    initialize(layer, 0)
    for parameter in (layer.turn_up, layer.skip):
        torch.nn.init.normal_(parameter)
    return layer.to(dtype)


@pytest.mark.parametrize("bounds", [(0, 37), (0, 1, 14, 37)], ids=["whole", "packed"])
def test_keys_write_and_queries_read(bounds):
    """y_t = S_t q_t, S_t = S_{t-1} A_t + v_t (rates k_t)^T token by token from a zero S, and all gradients."""
    layer = _layer(torch.float64)
    x = torch.randn(1, 37, D_MODEL, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    source = layer.source(x, cu_seqlens=cu_seqlens)[0][0]
    values, base = source.unflatten(-1, (16, 4)), torch.eye(4) + layer.turn_base.view(16, 4, 4)
    rows = base + torch.einsum("lhp,hpe->lhe", values, layer.turn_up).unflatten(-1, (4, 4))
    rows = rows / rows.abs().sum(-1, keepdim=True).clamp(min=1)
    keys, queries = layer.key_proj(source), layer.query_proj(source)
    read, memory = [], torch.zeros(16, 4, 4, dtype=torch.float64)
    for t in range(37):
        memory = 0 * memory if t in bounds else memory @ rows[t]
        memory = memory + values[t, :, :, None] * (keys[t] * layer.key_rates)[:, None]
        read.append((memory @ queries[t]).flatten())
    mixed = torch.stack(read) + source * layer.skip
    expected = layer.out_proj(mixed * F.silu(layer.gate_proj(x[0])))[None]
    y = layer(x, cu_seqlens=cu_seqlens if len(bounds) > 2 else None)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    cotangent, given = torch.randn_like(expected), [x, *layer.parameters()]
    wanted = torch.autograd.grad(expected, given, cotangent)
    for found, right in zip(torch.autograd.grad(y, given, cotangent), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("bounds", [(0, 23), (0, 1, 1, 14, 23)], ids=["whole", "packed"])
def test_products_are_added(bounds):
    """H_t = H_{t-1} X_t / (1 + a^2) token by token from the identity, X_t what Newton and Schulz's steps give, and all
    gradients; what the memory gives stays what it was."""
    layer = _layer(torch.float64, products=3)
    heads, cu_seqlens = layer.products, torch.tensor(bounds, dtype=torch.int32)
    x = torch.randn(1, 23, D_MODEL, dtype=torch.float64, requires_grad=True)
    fade = 1 / (1 + heads.fade_root**2)
    states, state = [], torch.eye(4, dtype=torch.float64)
    for t, elements in enumerate((x[0] @ heads.in_proj.weight.T).view(23, 3, 4, 4)):
        made = elements + torch.eye(4, dtype=torch.float64)
        made = made / norm_bound(made)
        for _ in range(10):
            made = 1.5 * made - 0.5 * made @ made.mT @ made
        state = (torch.eye(4, dtype=torch.float64) if t in bounds else state) @ (made * fade[:, None, None])
        states.append(state.flatten())
    added = torch.stack(states) @ heads.out_proj.weight.T
    packed = {"cu_seqlens": cu_seqlens} if len(bounds) > 2 else {}
    y = layer(x, **packed)
    layer.products = None
    expected = layer(x, **packed) + added
    layer.products = heads
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    cotangent, given = torch.randn_like(expected), [x, *heads.parameters()]
    wanted = torch.autograd.grad(expected, given, cotangent)
    for found, right in zip(torch.autograd.grad(y, given, cotangent), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-7, atol=1e-10)


def test_states_go_on_in_the_middle_of_a_text():
    layer = _layer(torch.float64, products=3)
    x = torch.randn(2, 19, D_MODEL, dtype=torch.float64)
    first, state = layer.forward_with_state(x[:, :11], layer.initial_state(2))
    rest = []
    for token in x[:, 11:].unbind(1):
        y, state = layer.step(token, state)
        rest.append(y)
    torch.testing.assert_close(torch.cat((first, torch.stack(rest, 1)), 1), layer(x), rtol=1e-10, atol=1e-12)
    assert [tuple(part.shape[1:]) for part in state] == [(64, 3), (16, 4, 4), (3, 4, 4)]


def test_products_fade_by_half_at_first():
    heads = _layer(products=4).products
    torch.testing.assert_close(faded(torch.ones(4, 4, 4), heads.fade_root), torch.full((4, 4, 4), 0.5))


def test_it_is_a_block_of_a_product_of_affine_matrices():
    """H_t = H_{t-1} X_t from the identity, X_t = [[A_t, 0], [v_t (rates k_t)^T, I]]: the MRU's recurrence."""
    layer = _layer(torch.float64)
    source, _ = layer.source(torch.randn(2, 19, D_MODEL, dtype=torch.float64))
    values, turns, keys, queries = layer.parts(source)
    x = torch.eye(8, dtype=torch.float64).repeat(2, 19, layer.nheads, 1, 1)
    x[..., :4, :4], x[..., 4:, :4] = turns, values.unsqueeze(-1) * keys.unsqueeze(-2)
    read = (matrix_product_scan(x)[..., 4:, :4] @ queries.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(layer.remember(source), read, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("products", [0, 2])
def test_outputs_and_gradients_are_finite_after_4096_tokens_whatever_the_weights(products):
    layer = _layer(products=products)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=10.0)
    x = torch.randn(1, 4096, D_MODEL, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(given.grad.isfinite().all() for given in (x, *layer.parameters()))


def test_a_new_layer_forgets_at_many_speeds():
    layer = MatrixMemory(D_MODEL, MatrixMemoryConfig(), causal=True, max_seqlen=64, output_std=0.1)
    initialize(layer, 0)
    _, turns, keys, _ = layer.parts(layer.source(torch.randn(1, 3, D_MODEL))[0])
    kept = turns.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(turns, torch.diag_embed(kept))
    assert (kept.min().item(), kept.max().item()) == pytest.approx((0.5, 0.997))
    assert len(kept[0, 0].flatten().unique()) == kept[0, 0].numel()
    torch.testing.assert_close(layer.key_rates, 1 - kept[0, 0])
    assert keys.shape == (1, 3, 16, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_state": 0}, "d_state = 0: must be from 1 to 32"),
        ({"d_conv": 1}, "d_conv = 1: must be from 2 to 9"),
        ({"headdim": 3}, "headdim = 3 does not divide the inner width"),
        ({"expand": 0}, "expand = 0: must be at least 1"),
        ({"products": -1}, "products = -1: must be at least 0"),
    ],
)
def test_options_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        _layer(**options)
