"""Structured masked attention: masks from their formulas, and two orders of one contraction."""

import math

import pytest
import torch
from module_results import assert_close, results, rounding
from nightly import each_value_once

from matmix.model.initialization import initialize
from matmix.model.mixers import MIXERS
from matmix.model.mixers.attention.masked import SmaGraph, fourier_mask

D_MODEL = 12
KINDS = ("sma_causal", "sma_decay", "sma_semiseparable", "sma_toeplitz", "sma_fourier", "sma_graph")


@pytest.fixture
def make(randomize):
    def build(name, length, dtype=torch.float64, **options):
        kind = MIXERS[name]
        config = kind.Config(headdim=6, **options)
        kind.check(D_MODEL, config)
        mixer = kind(D_MODEL, config, causal=kind.causal_form, max_seqlen=length, output_std=0.02)
        return randomize(mixer, 0.5, dtype)

    return build


@pytest.mark.parametrize(("name", "length"), each_value_once(KINDS, [13, 40, 2]))
def test_both_orders_agree(make, name, length):
    """Forward and all gradients."""
    x = torch.randn(2, length, D_MODEL, dtype=torch.float64)
    linear, quadratic = (results(make(name, length, contraction=order), "cpu", x) for order in ("linear", "quadratic"))
    for part, wanted in quadratic.items():
        assert (linear[part] - wanted).abs().max() < 1e-11 * wanted.abs().max(), part


@pytest.mark.parametrize(("name", "length"), each_value_once(KINDS, [40, 2, 13]))
def test_both_orders_agree_in_float32(make, name, length):
    x = torch.randn(2, length, D_MODEL)
    linear, quadratic = (make(name, length, torch.float32, contraction=order) for order in ("linear", "quadratic"))
    assert_close(results(linear, "cpu", x), results(quadratic, "cpu", x), rounding(quadratic, x))


@pytest.mark.parametrize("name", ["sma_causal", "sma_decay", "sma_semiseparable", "sma_fourier", "sma_graph"])
def test_both_orders_agree_for_packed_documents(make, name):
    x, cu_seqlens = torch.randn(1, 20, D_MODEL, dtype=torch.float64), torch.tensor([0, 7, 7, 8, 20], dtype=torch.int32)
    linear, quadratic = (make(name, 20, contraction=order)(x, cu_seqlens, 12) for order in ("auto", "quadratic"))
    torch.testing.assert_close(linear, quadratic, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["sma_toeplitz", "sma_fourier", "sma_graph"])
def test_masks_without_scans_take_the_order_of_fewer_operations(make, name):
    chosen = set()
    for length in (5, 300):
        mixers = {order: make(name, length, contraction=order) for order in ("auto", "linear", "quadratic")}
        flops = {order: mixer.mixing_flops(D_MODEL, mixer.config, length, False) for order, mixer in mixers.items()}
        fewer = min(("linear", "quadratic"), key=flops.get)
        chosen.add(fewer)
        assert flops["auto"] == flops[fewer]
        x = torch.randn(1, length, D_MODEL, dtype=torch.float64)
        found = {order: mixer(x) for order, mixer in mixers.items()}
        assert torch.equal(found["auto"], found[fewer])
        assert not torch.equal(found["linear"], found["quadratic"]), "bits tell the orders apart"
    assert chosen == {"linear", "quadratic"}


def _formula(mixer, x, i, j):
    """L[i, j] of every head for x (1, L, d_model)."""
    ones, length = torch.ones(mixer.nheads, dtype=x.dtype), x.shape[1]
    if mixer.name == "sma_toeplitz":
        return mixer.alpha[:, i - j + length - 1]
    if mixer.name == "sma_fourier":
        return ones * math.cos(2 * math.pi * i * j / length)
    if mixer.name == "sma_graph":  # three columns, the root of 11
        return torch.sigmoid(mixer.gamma_logit) ** (abs(i // 3 - j // 3) + abs(i % 3 - j % 3))
    if i < j:
        return 0 * ones
    if mixer.name == "sma_decay":
        return torch.sigmoid(mixer.gamma_logit) ** (i - j)
    if mixer.name == "sma_semiseparable":
        return torch.sigmoid(mixer.gate_proj(x[0, j + 1 : i + 1])).prod(0)
    return ones


@pytest.mark.parametrize("name", KINDS)
def test_masks_are_their_formulas(make, name):
    mixer, x = make(name, 11), torch.randn(1, 11, D_MODEL, dtype=torch.float64)
    wanted = torch.stack([torch.stack([_formula(mixer, x, i, j) for j in range(11)], -1) for i in range(11)], 1)
    torch.testing.assert_close(mixer.mask(x)[0].expand_as(wanted), wanted, rtol=1e-11, atol=1e-13)


def _climbed(i, j, branches):
    """Edges between two nodes of a tree: the later one climbs until they meet."""
    if i == j:
        return 0
    return 1 + _climbed((max(i, j) - 1) // branches, min(i, j), branches)


@pytest.mark.parametrize("branches", [2, 3])
def test_masks_of_a_tree_are_decays_to_the_distance(make, branches):
    mixer, other = (
        make("sma_graph", 23, graph="tree", branches=branches, contraction=order) for order in ("linear", "quadratic")
    )
    x = torch.randn(2, 23, D_MODEL, dtype=torch.float64)
    distance = torch.tensor([[_climbed(i, j, branches) for j in range(23)] for i in range(23)])
    wanted = torch.sigmoid(mixer.gamma_logit)[:, None, None] ** distance
    torch.testing.assert_close(mixer.mask(x)[0], wanted, rtol=1e-11, atol=0)
    other.load_state_dict(mixer.state_dict())
    torch.testing.assert_close(mixer(x), other(x), rtol=1e-9, atol=1e-11)


class _Ring(SmaGraph):
    def distances(self, length, device):
        steps = (torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)) % length
        return torch.minimum(steps, length - steps)


def test_a_graph_of_ones_own_gives_its_mask(randomize):
    config = _Ring.Config(headdim=6, contraction="quadratic")
    mixer = randomize(_Ring(D_MODEL, config, causal=False, max_seqlen=9, output_std=0.02), 0.5, torch.float64)
    wanted = torch.sigmoid(mixer.gamma_logit)[:, None, None] ** torch.tensor(
        [[min(abs(i - j), 9 - abs(i - j)) for j in range(9)] for i in range(9)]
    )
    torch.testing.assert_close(mixer.mask(torch.randn(1, 9, D_MODEL, dtype=torch.float64))[0], wanted)
    with pytest.raises(ValueError, match="contraction = 'auto': knows grids and trees alone; _Ring needs quadratic"):
        _Ring.check(D_MODEL, _Ring.Config(headdim=6))
    own = type("_FastRing", (_Ring,), {"linear_order": lambda self, x, cu_seqlens: self.quadratic_order(x)})
    own.check(D_MODEL, own.Config(headdim=6))


def test_the_fourier_mask_keeps_its_digits_in_float32():
    """Angles of 2 pi i j / L are hundreds of turns here; float32 would keep few digits of what is beyond whole ones."""
    exact, single = (fourier_mask(1000, torch.empty(0, dtype=dtype)) for dtype in (torch.float64, torch.float32))
    assert (exact - single).abs().max() < 1e-6


def test_closed_gates_stay_finite_and_forget(make):
    for order in ("linear", "quadratic"):
        mixer = make("sma_semiseparable", 20, torch.float32, contraction=order)
        with torch.no_grad():
            mixer.gate_proj.weight.zero_()
            mixer.gate_proj.bias.copy_(torch.tensor([-1000.0, 100.0]))
        found = results(mixer, "cpu", torch.randn(1, 20, D_MODEL))
        assert all(result.isfinite().all() for result in found.values())
        closed, opened = mixer.mask(torch.randn(1, 20, D_MODEL))[0]
        assert torch.equal(closed, torch.eye(20))
        assert torch.equal(opened, torch.ones(20, 20).tril())


def test_initial_decays_are_those_of_retnet():
    for name, decays in (("sma_decay", lambda m: m.gamma_logit), ("sma_semiseparable", lambda m: m.gate_proj.bias)):
        mixer = MIXERS[name](64, MIXERS[name].Config(headdim=16), causal=True, max_seqlen=8, output_std=0.02)
        initialize(mixer, seed=0)
        wanted = 1 - 2.0 ** -(5 + torch.arange(4.0))
        torch.testing.assert_close(torch.sigmoid(decays(mixer)), wanted, rtol=1e-6, atol=0)
    toeplitz = MIXERS["sma_toeplitz"](
        64, MIXERS["sma_toeplitz"].Config(headdim=16), causal=False, max_seqlen=8, output_std=0.02
    )
    initialize(toeplitz, seed=0)
    distance = (torch.arange(15.0) - 7).abs()
    torch.testing.assert_close(toeplitz.alpha, wanted[:, None] ** distance, rtol=1e-5, atol=0)
