"""Layers that run as one operation on GPUs, on Triton kernels: outputs and gradients of the composed PyTorch form."""

from __future__ import annotations

import functools

import pytest
import torch
from module_results import assert_close, results, rounding
from nightly import each_value_once
from triton_on_cpu import names

from matmix.model.mixers import MIXERS
from matmix.model.mixers.scans import lion, scan_block

PACKED = torch.tensor([0, 5, 5, 6, 40], dtype=torch.int32)
SMALL = {"headdim": 16, "d_state": 8}
CASES = [
    ("semiseparable", SMALL | {"ngroups": 2, "bias": True}),
    ("semiseparable", SMALL | {"norm_before_gate": True, "conv_bias": False}),
    ("bidirectional_add", SMALL),
    ("bidirectional_add_diagonal", SMALL | {"ngroups": 2}),
    ("bidirectional_add_shift", SMALL | {"chunk_size": 16}),
    ("lion_lit", {"headdim": 8}),
    ("lion_d", {"headdim": 8, "qkv_bias": True}),
    ("lion_s", {"headdim": 8}),
    ("lion_s", {"headdim": 8, "gate_offset": 0, "forward_gate_offset": 1, "form": "chunked"}),
]


@pytest.fixture
def on_triton(interpreter, monkeypatch):
    """Turns the backend of the layers to Triton; returns the device."""

    def turn():
        for module, name in (
            (scan_block, "scan_layer"), (lion, "lion_mixer"), (lion, "lion_mixer_is_fused"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, functools.partial(getattr(module, name), backend="triton"))
        return interpreter

    return turn


@pytest.fixture
def make(randomize):
    def build(name, options):
        kind = MIXERS[name]
        config = kind.Config(**options)
        kind.check(16, config)
        return randomize(kind(16, config, causal=not kind.bidirectional_form, max_seqlen=64, output_std=0.02))

    return build


@pytest.mark.parametrize(("case", "packed"), each_value_once(CASES, [True, False]))
def test_layer(on_triton, launched, make, case, packed):
    (name, options), cu_seqlens = case, PACKED if packed else None
    layer = make(name, options)
    x = torch.randn(1 if cu_seqlens is not None else 2, 40, 16)
    rounded = rounding(layer, x, cu_seqlens=cu_seqlens)
    wanted = results(layer, "cpu", x, cu_seqlens=cu_seqlens)
    assert not launched
    found = results(layer, on_triton(), x, cu_seqlens=cu_seqlens)
    # Gates of LION that all tokens share get sums of terms that cancel.
    rounded = {key: error * (8 if key in ("a_i", "a_i.bias") else 1) for key, error in rounded.items()}
    assert_close(found, wanted, rounded)
    assert (names(launched).count("mix"), names(launched).count("pair_gradients")) == (1, 1)


@pytest.mark.parametrize("name", ["bidirectional_mult", "bidirectional_concat"])
def test_other_ways_to_join_two_scans_are_composed(on_triton, launched, make, name):
    """Of the Triton forms of convolution, scan and norm."""
    layer, x = make(name, SMALL), torch.randn(1, 40, 16)
    rounded, wanted = rounding(layer, x), results(layer, "cpu", x)
    assert not launched
    assert_close(results(layer, on_triton(), x), wanted, rounded)
    assert {"_convolve", "mix", "_gated_norm"} <= set(names(launched))


@pytest.mark.parametrize("form", ["attention", "recurrent"])
def test_other_forms_of_lion_are_composed(on_triton, launched, make, form):
    layer, x = make("lion_s", {"headdim": 8, "form": form}), torch.randn(1, 12, 16)
    wanted = layer(x)
    if on_triton() == "cpu":
        assert torch.equal(layer(x), wanted)
        assert not launched


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [CASES[0], CASES[3], CASES[7], ("hydra", SMALL | {"recompute": True})],
)
def test_compiled(on_triton, make, name, options):
    """Traced whole, with the same numbers."""
    layer = make(name, options)
    x = torch.randn(2, 40, 16)
    device = on_triton()
    wanted = results(layer, device, x)
    torch.compiler.reset()
    found = results(torch.compile(layer, backend="aot_eager", fullgraph=True), device, x)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key.removeprefix("_orig_mod.")], rtol=1e-5, atol=1e-6, msg=key)


def test_matrix_and_values_still_describe_the_layer(on_triton, make):
    """show-mixer's view of it: the definition that the fused form agrees with."""
    layer, x = make("semiseparable", SMALL), torch.randn(1, 20, 16)
    expected = layer.combine(layer.mix(layer.matrix(x), layer.values(x)), x)
    device = on_triton()
    found = layer.to(device)(x.to(device)).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
