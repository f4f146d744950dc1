"""The MRU over many tokens, in generation, and with every construction."""

import math

import pytest
import torch
import torch.nn.functional as F
from nightly import each_value_once, nightly

from matmix.kernels.matrix_product.definition import matrix_product_definition
from matmix.kernels.matrix_product.scans import SCANS
from matmix.kernels.mru.constructions import BOUNDED_CONSTRUCTIONS, CONSTRUCTIONS, state_elements
from matmix.model import build_model, initialize
from matmix.model.mixers.mru import MRU, MRUConfig

D_MODEL = 32


def _layer(dtype=torch.float32, **options):
    config = MRUConfig(**{"order": 4, **options})
    MRU.check(D_MODEL, config)
    layer = MRU(D_MODEL, config, causal=True, max_seqlen=64, output_std=0.02)
    initialize(layer, 0)
    return layer.to(dtype)


def _train(model, steps, length=64):
    ids = torch.randint(61, (4, length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        logits = model(ids[:, :-1])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("construction", "options"),
    each_value_once(CONSTRUCTIONS, [("dense", False), ("dense", True), ("chunked", False)]),
)
def test_every_construction_trains_all_its_parameters(small_config, construction, options):
    form, decay = options
    mru = MRUConfig(order=4, construction=construction, decay=decay, input=form)
    model = build_model(small_config(mru=mru))
    initialize(model, 0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert sum(name.endswith("decay_root") for name in before) == (3 if decay else 0)
    _train(model, 2)
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
        assert not torch.equal(parameter, before[name]), name


@torch.no_grad()
def _generated(model, ids):
    state, steps = model.initial_state(ids.shape[0]), []
    for t in range(ids.shape[1]):
        logits, state = model.step(ids[:, t], state)
        steps.append(logits)
    return torch.stack(steps, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("construction", [BOUNDED_CONSTRUCTIONS[0], *map(nightly, BOUNDED_CONSTRUCTIONS[1:])])
def test_512_generated_tokens_equal_the_parallel_form(small_config, small_model, construction):
    mru, ids = MRUConfig(order=4, construction=construction, decay=True), torch.randint(61, (1, 512))
    model = build_model(small_config(mru=mru))
    initialize(model, 0)
    _train(model, 20)
    # 512 products of matrices of order 4 in a row round 4 * 512 times, by 2^-24 and at worst all in one direction:
    # 1.2e-4 of the last state, from which logits of about 1 are made.
    torch.testing.assert_close(_generated(model, ids), model(ids), rtol=2e-4, atol=2e-4)
    # With weights as large as these every layer sums the rounding of the one before up: not in float32.
    for exact in (model.double(), small_model(mru=mru, dtype=torch.float64)):
        torch.testing.assert_close(_generated(exact, ids), exact(ids), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("construction", ["cayley", "householder"])
def test_orthogonal_states_keep_their_norm_for_8192_tokens(construction):
    layer = _layer(order=8, nheads=2, construction=construction)
    size = layer.in_proj.out_features // 2
    states, final = layer.mixed(torch.randn(1, 8192, 2, size))
    norms = torch.linalg.matrix_norm(states)
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(8)), rtol=1e-3, atol=0)
    assert torch.equal(final, states[:, -1])
    for norm in layer.monitor().values():
        assert norm == pytest.approx(math.log(8) / 2, abs=1e-3)


def test_cayleys_states_keep_their_norm_after_training(small_config):
    model = build_model(small_config(mru=MRUConfig(order=4, construction="cayley")))
    initialize(model, 0)
    _train(model, 20)
    with torch.no_grad():
        model(torch.randint(61, (1, 8192)))
    assert model.blocks[0].mixer.in_proj.weight.abs().max() > 0.01
    for norm in model.monitor().values():
        assert norm == pytest.approx(math.log(4) / 2, abs=1e-3)


@pytest.mark.parametrize("construction", ["newton_schulz", "ldu_newton_schulz"])
def test_newton_schulzs_states_never_grow(construction):
    layer = _layer(order=8, nheads=2, construction=construction)
    layer.mixed(torch.randn(1, 8192, 2, 64) * torch.linspace(0, 1, 8192)[:, None, None])
    assert layer.monitor()["log_norm_max"] < math.log(8) / 2 + 0.01


@pytest.mark.parametrize("form", ["chunked", "dense"])
@pytest.mark.parametrize(("options", "std"), [({}, 1.0), ({"element_std": 0.25}, 0.25)])
def test_newton_schulzs_matrices_start_apart_and_are_read_as_large_as_tokens(form, options, std):
    layer, x = _layer(construction="newton_schulz", input=form, **options), torch.randn(4, 50, D_MODEL)
    assert layer.elements(x).std().item() == pytest.approx(std, rel=0.2)
    assert (layer.state_matrices(x) @ layer.read_out()).std().item() == pytest.approx(1.0, rel=0.3)


def test_the_chunked_form_has_few_weights_and_factors_in_its_place():
    """X = I + s (chunks W_up), outputs (H W_down) d_model / order; state matrices start as the identity."""
    layer, dense = _layer(input="chunked", construction="identity_plus"), _layer(construction="identity_plus")
    assert sum(p.numel() for p in layer.parameters()) == sum(p.numel() for p in dense.parameters()) - 32 * 32 + 2 * 16
    x = torch.randn(2, 9, D_MODEL)
    assert torch.equal(layer.state_matrices(x), torch.eye(4).expand(2, 9, 2, 4, 4))
    torch.nn.init.normal_(layer.state_up)
    m = torch.einsum("blhic,hcj->blhij", x.unflatten(-1, (2, 4, 4)), layer.state_up)
    factor = 0.08 * (1 / 4) * (D_MODEL / 4)
    torch.testing.assert_close(layer.state_matrices(x), torch.eye(4) + factor * m)
    states, _ = layer.mixed(layer.elements(x))
    y = layer.out_proj(((states @ layer.state_down) * (D_MODEL / 4)).flatten(-3))
    torch.testing.assert_close(layer(x), y)
    scaled = _layer(input="chunked", construction="identity_plus", element_scale=3 * factor, output_scale=5.0)
    scaled.load_state_dict(layer.state_dict())
    torch.testing.assert_close(scaled.state_matrices(x), torch.eye(4) + 3 * factor * m)
    states, _ = scaled.mixed(scaled.elements(x))
    torch.testing.assert_close(scaled(x), scaled.out_proj(((states @ layer.state_down) * 5).flatten(-3)))


def test_the_chunked_form_costs_less_arithmetic():
    dense, chunked = (
        MRU.flops_per_token(512, MRUConfig(order=8, input=form, construction="ldu"), 100, True)
        for form in ("dense", "chunked")
    )
    assert dense - chunked == 2 * (512 * 512 - 512 * 8)


def test_the_dense_form_is_scaled_on_request():
    layer = _layer(construction="cayley")
    twice = _layer(construction="cayley", element_scale=2.0, output_scale=0.5)
    torch.nn.init.normal_(layer.in_proj.weight)
    twice.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, D_MODEL)
    torch.testing.assert_close(twice.elements(x), 2 * layer.elements(x))
    states, _ = twice.mixed(twice.elements(x))
    torch.testing.assert_close(twice(x), layer.combine(states, x) / 2)


@pytest.mark.parametrize("form", ["dense", "chunked"])
def test_dropout_is_on_the_elements_of_either_form(form):
    layer = _layer(input=form, construction="identity_plus", dropout=0.5, element_scale=1.0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 200, D_MODEL)
    kept = layer.eval().elements(x)
    dropped = layer.train().elements(x)
    zero = dropped == 0
    assert 0.4 < zero.float().mean() < 0.6
    torch.testing.assert_close(dropped[~zero], 2 * kept[~zero])


def test_the_monitor_is_the_log_of_the_frobenius_norm():
    layer = _layer(construction="ldu")
    states, final = layer.mixed(torch.randn(2, 200, 2, 16) * 0.3)
    looked_at = torch.cat([states[:, 63::64].flatten(0, 2), final.flatten(0, 1)])
    norms = torch.linalg.matrix_norm(looked_at).log()
    torch.testing.assert_close(layer.monitor()["log_norm_max"], norms.amax())
    torch.testing.assert_close(layer.monitor()["log_norm_mean"], norms.mean())


def test_decay_lowers_log_norms_by_a_constant_per_token():
    plain, decaying = _layer(construction="cayley"), _layer(construction="cayley", decay=True)
    elements = torch.randn(1, 100, 2, 6)
    with torch.no_grad():
        decaying.decay_root.copy_(torch.tensor([0.0, 0.5]))
    tokens = torch.arange(1, 101)[:, None, None]
    expected = plain.mixed(elements)[0] * torch.stack([torch.ones(100), 0.8 ** tokens.flatten()], 1)[..., None, None]
    torch.testing.assert_close(decaying.mixed(elements)[0], expected, rtol=1e-4, atol=1e-6)
    initialize(decaying, 0)
    assert decaying.decay_root.abs().max().item() == pytest.approx(0.01)


@pytest.mark.parametrize("construction", ["identity_plus", "ldu", "qr"])
def test_an_overflow_in_generation_is_an_error_that_names_the_construction(small_model, construction):
    model = small_model(mru=MRUConfig(order=4, construction=construction))
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.in_proj.weight.normal_(std=2)
    model(torch.randint(61, (1, 1000)))
    assert not all(norm.isfinite() for norm in model.monitor().values())
    message = f"left the range of float32 .*: construction '{construction}' does not bound"
    with pytest.raises(OverflowError, match=message):
        model.prefill(torch.randint(61, (1, 1000)))
    with pytest.raises(OverflowError, match=message):
        _generated(model, torch.randint(61, (1, 1000)))


def test_generation_stops_before_finite_states_make_logits_nan(small_model):
    model = small_model(mru=MRUConfig(order=4, construction="identity_plus"))
    state = [torch.full((1, 2, 4, 4), size) for size in (1.0, 1e30, 1.0)]
    with pytest.raises(OverflowError, match=r"log-norm 7"):
        model.step(torch.zeros(1, dtype=torch.int64), state)


@pytest.mark.parametrize("scan", SCANS)
def test_plain_is_the_readme_to_the_letter(scan):
    """X = reshape(x) W_in, H_j = X_1 ... X_j, y = reshape(H W_out), and an output projection; all gradients."""
    layer = _layer(torch.float64, construction="plain", scan=scan)
    x = torch.randn(2, 37, D_MODEL, dtype=torch.float64, requires_grad=True)
    matrices = torch.einsum("blhic,hcj->blhij", x.unflatten(-1, (2, 4, 4)), layer.state_up)
    states, _ = matrix_product_definition(matrices, return_final_state=True)
    expected = layer.out_proj((states @ layer.state_down).flatten(-3))
    cotangent, given = torch.randn_like(expected), [x, *layer.parameters()]
    y = layer(x)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-13)
    wanted = torch.autograd.grad(expected, given, cotangent)
    for found, right in zip(torch.autograd.grad(y, given, cotangent), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["chunked", "dense"])
def test_plain_state_matrices_keep_norms_on_average_at_first(form):
    layer = _layer(construction="plain", input=form)
    squares = layer.state_matrices(torch.randn(64, 64, D_MODEL)).square().sum((-1, -2)).mean()
    assert squares.item() == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize(("construction", "order"), each_value_once(CONSTRUCTIONS, [2, 3, 5, 12]))
def test_orders_between_those_of_the_scan_are_padded(construction, order):
    layer = MRU(
        4 * order, MRUConfig(order=order, nheads=2, construction=construction), causal=True, max_seqlen=9, output_std=1
    ).double()
    elements = torch.randn(2, 9, 2, state_elements(construction, order), dtype=torch.float64) * 0.3
    start = torch.randn(2, 2, order, order, dtype=torch.float64)
    states, final = layer.mixed(elements, initial_state=start)
    matrices, expected = layer.build(elements), [start]
    for t in range(9):
        expected.append(expected[-1] @ matrices[:, t])
    torch.testing.assert_close(states, torch.stack(expected[1:], 1))
    torch.testing.assert_close(final, expected[-1])
    assert states.shape[-1] == order


def test_affine_layers_give_finite_outputs_and_gradients_after_4096_tokens_whatever_their_weights():
    layer = _layer(nheads=2)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=10.0)
    x = torch.randn(1, 4096, D_MODEL, requires_grad=True)
    y = layer(x)
    y.square().mean().backward()
    assert y.isfinite().all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name


def test_affine_states_forget_at_first():
    """With the rates of a new layer, what the first token wrote is gone in some coordinates and kept in others."""
    layer = _layer(order=8, nheads=4)
    torch.nn.init.zeros_(layer.state_up)
    x = torch.zeros(1, 300, 4, state_elements("affine", 8))
    x[:, 0] = torch.randn(4, state_elements("affine", 8))
    states, _ = layer.mixed(x + layer.state_base)
    left = (states[0, -1, :, 4:, :4].norm(dim=1) / states[0, 0, :, 4:, :4].norm(dim=1)).flatten()
    assert left.min() < 1e-3
    assert left.max() > 0.3


def test_blended_elements_see_the_token_before_and_no_other():
    layer = _layer(shift="blend", dtype=torch.float64)
    torch.nn.init.normal_(layer.state_up)
    torch.nn.init.uniform_(layer.shift_share, 0.2, 0.8)
    x = torch.randn(1, 6, D_MODEL, dtype=torch.float64)
    change = torch.autograd.functional.jacobian(lambda x: layer.elements(x)[0].flatten(1), x)[:, :, 0].norm(dim=(1, 3))
    seen = change > 0
    assert torch.equal(seen, torch.ones(6, 6).tril().triu(-1).bool())


def test_order_one_is_a_running_product():
    layer = MRU(4, MRUConfig(order=1, nheads=2, construction="identity_plus"), causal=True, max_seqlen=9, output_std=1)
    initialize(layer, 0)
    elements = torch.randn(1, 20, 2, 1) * 0.3
    torch.testing.assert_close(layer.mixed(elements)[0].squeeze(-1), (1 + elements).cumprod(1))
