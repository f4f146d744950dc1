"""The Hydra layer and an encoder of such layers on Triton kernels: outputs and gradients of the PyTorch form."""

from __future__ import annotations

import functools

import pytest
import torch
from module_results import assert_close, results, rounding
from nightly import each_value_once
from storages import Storages
from triton_on_cpu import names

from matmix.kernels.launching import record_launches
from matmix.model.mixers.scans import scan_block
from matmix.model.mixers.scans.hydra import Hydra, HydraConfig
from matmix.train.activation import checkpoint_activations

PACKED = torch.tensor([0, 5, 5, 6, 40], dtype=torch.int32)


@pytest.fixture
def on_triton(interpreter, monkeypatch):
    """Turns the backend of the layer to Triton; returns the device."""

    def turn():
        monkeypatch.setattr(scan_block, "scan_layer", functools.partial(scan_block.scan_layer, backend="triton"))
        return interpreter

    return turn


@pytest.mark.parametrize(
    ("options", "cu_seqlens", "recompute"),
    each_value_once([{}, {"learnable_init_states": True, "ngroups": 2, "bias": True}], [None, PACKED], [False, True]),
)
def test_layer(on_triton, launched, randomize, options, cu_seqlens, recompute):
    config = HydraConfig(headdim=16, d_state=8, recompute=recompute, **options)
    layer = randomize(Hydra(16, config, causal=False, max_seqlen=64, output_std=0.02))
    x = torch.randn(1 if cu_seqlens is not None else 2, 40, 16)
    rounded = rounding(layer, x, cu_seqlens=cu_seqlens)
    wanted = results(layer, "cpu", x, cu_seqlens=cu_seqlens)
    assert not launched
    device = on_triton()
    assert_close(results(layer, device, x, cu_seqlens=cu_seqlens), wanted, rounded)
    # The scan's output is kept where the rest is computed again.
    counts = [names(launched).count(name) for name in ("mix", "pair_gradients", "_convolve", "_gated_norm")]
    assert counts == [1, 1, 2 if recompute else 1, 2 if recompute else 1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["padded", "packed", "recompute", "full", "op"])
def test_encoder(on_triton, launched, small_model, how):
    """Two layers; with masks of padding, packed documents, and everything that computes activations again."""
    config = HydraConfig(headdim=16, d_state=4, recompute=how == "recompute")
    model = small_model("encoder", ("hydra",), hydra=config, n_layers=2, d_model=16).train()
    ids = torch.randint(61, (1, 40) if how == "packed" else (2, 34))
    mask = None
    if how == "padded":
        mask = torch.ones_like(ids)
        mask[1, 20:] = 0
    options = {"attention_mask": mask, "cu_seqlens": PACKED if how == "packed" else None}
    rounded = rounding(model, ids, **options)
    wanted = results(model, "cpu", ids, **options)
    if how in ("full", "op"):
        checkpoint_activations(model, "full" if how == "full" else "selective", selective_by="op")
    device = on_triton()
    assert_close(results(model, device, ids, **options), wanted, rounded)
    assert names(launched).count("mix") == 2 * (2 if how == "full" else 1)


@pytest.mark.slow
def test_long_documents_pass_states_in_spans(on_triton, launched, randomize):
    """As pretraining packs them, with the smallest chunks."""
    config = HydraConfig(headdim=4, d_state=3, expand=1, chunk_size=16)
    layer = randomize(Hydra(4, config, causal=False, max_seqlen=1024, output_std=0.02))
    x, cu_seqlens = torch.randn(1, 530, 4), torch.tensor([0, 7, 7, 500, 530], dtype=torch.int32)
    rounded = rounding(layer, x, cu_seqlens=cu_seqlens)
    wanted = results(layer, "cpu", x, cu_seqlens=cu_seqlens)
    assert_close(results(layer, on_triton(), x, cu_seqlens=cu_seqlens), wanted, rounded)
    assert "combine_spans" in names(launched)


def test_bytes_kept_per_token(on_triton):
    """By the op that made them, in bfloat16; figures in docs/training.md."""
    layer = Hydra(768, HydraConfig(), causal=False, max_seqlen=512, output_std=0.02).bfloat16()
    device = on_triton()
    layer = layer.to(device)
    found = {}
    for recompute in (False, True):
        layer.recompute = recompute
        x = torch.randn(1, 64, 768, dtype=torch.bfloat16, device=device, requires_grad=True)
        with record_launches(), Storages() as storages:
            y = layer(x)
        kept: dict[str, float] = {"input": 2 * 768}
        for allocation in storages.allocations:
            if allocation.alive and allocation.storage.cdata != y.untyped_storage()._weak_ref():
                op = allocation.op.split(".")[1]
                kept[op] = kept.get(op, 0) + allocation.bytes / 64
        found[recompute] = kept
    always = {"input": 2 * 768, "mm": 2 * 3376}
    scan, conv, product, norm = 2 * 1536, 2 * (1536 + 4 * 64), 2 * 24, 2 * 1536
    assert found == {
        False: always | {"conv_and_scan": scan + conv + product, "scan_layer": norm},
        True: always | {"conv_and_scan": scan},
    }
    assert [sum(kept.values()) for kept in found.values()] == [18064, 11360]


@pytest.mark.parametrize("packed", [False, True])
def test_recomputed_gradients_are_the_same_bit_for_bit(on_triton, randomize, packed):
    layer = randomize(Hydra(16, HydraConfig(headdim=16, d_state=8), causal=False, max_seqlen=64, output_std=0.02))
    x, cu_seqlens = torch.randn(1 if packed else 2, 40, 16), PACKED if packed else None
    device = on_triton()
    plain = results(layer, device, x, cu_seqlens=cu_seqlens)
    layer.recompute = True
    again = results(layer, device, x, cu_seqlens=cu_seqlens)
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []
