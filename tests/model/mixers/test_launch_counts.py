"""How many launches the layers make: at most 12 forward and 16 backward besides the matrix products."""

from __future__ import annotations

import functools

import pytest
import torch
from launch_count import counted
from nightly import nightly
from triton_on_cpu import names

from matmix.kernels import checks
from matmix.model.mixers import MIXERS
from matmix.model.mixers.scans import lion, scan_block

LAYER = "matmix.kernels.scan_layer.fused"
LION = "matmix.kernels.lion.fused"
INSIDE = [(LAYER, "forward_scan"), (LAYER, "forward"), (LAYER, "backward"), (LION, "forward"), (LION, "backward")]
FORBIDDEN = {"cat", "addmm_", "copy_", "clone"}
SMALL = {"headdim": 16, "d_state": 16}


@pytest.fixture
def on_triton(interpreter, monkeypatch):
    for module, name in (
        (scan_block, "scan_layer"), (lion, "lion_mixer"), (lion, "lion_mixer_is_fused"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), backend="triton"))
    monkeypatch.setattr(checks, "can_look", lambda tensor: False)  # at values, as on a GPU


def tokens(packed: bool, dtype=torch.bfloat16):
    """65,536 tokens in rows of 512, or as many documents in one row."""
    x = torch.randn(1 if packed else 128, (128 if packed else 1) * 512, 32, dtype=dtype)
    return x, torch.arange(0, 129 * 512, 512, dtype=torch.int32) if packed else None


def count(monkeypatch, layer, x, **options):
    """Names of launches and of other operations but products, forward and backward, and the numbers of products."""
    x.requires_grad_()
    found = []
    with counted(monkeypatch, INSIDE) as (launches, others):
        y = layer(x, **options)
    found.append((only_its_own(launches), others.others, others.products))
    with counted(monkeypatch, INSIDE) as (launches, others):
        y.backward(torch.empty_like(y))
    found.append((only_its_own(launches), others.others, others.products))
    return found


def only_its_own(launches):
    """Names of launches without those that are made once for all layers of a batch."""
    return [name for name in names(launches) if name != "fill_table"]


@pytest.mark.parametrize(
    ("name", "options", "products", "starts"),
    [
        ("hydra", SMALL, (3, 6), (6, 12)),
        ("hydra", SMALL | {"recompute": True}, (3, 7), (6, 14)),
        nightly("hydra", SMALL | {"dt_limit_low": 0.1, "dt_limit_high": 0.5}, (3, 6), (6, 12)),
        nightly("bidirectional_add", SMALL, (2, 4), (6, 11)),
        nightly("bidirectional_add_diagonal", SMALL, (3, 6), (6, 11)),
        ("bidirectional_add_shift", SMALL, (2, 4), (6, 12)),
        ("semiseparable", SMALL, (2, 4), (5, 12)),
        nightly("semiseparable", SMALL | {"norm_before_gate": True}, (2, 4), (5, 12)),
        nightly("lion_lit", {"headdim": 16}, (2, 4), (3, 8)),
        nightly("lion_d", {"headdim": 16}, (2, 4), (5, 13)),
        ("lion_s", {"headdim": 16}, (3, 6), (8, 16)),
    ],
)
@pytest.mark.parametrize("packed", [nightly(False), True])
def test_layers(on_triton, monkeypatch, randomize, name, options, products, starts, packed):
    """A batch so large that one program takes all heads of a group, as in training; figures in docs/kernels.md."""
    kind = MIXERS[name]
    layer = kind(32, kind.Config(**options), causal=not kind.bidirectional_form, max_seqlen=512, output_std=0.02)
    layer = randomize(layer, dtype=torch.bfloat16)
    x, cu_seqlens = tokens(packed)
    check(count(monkeypatch, layer, x, cu_seqlens=cu_seqlens), products, starts)


def test_a_layer_with_weights_in_float32(on_triton, monkeypatch, randomize):
    """Under autocast, which rounds the weights of all products."""
    kind = MIXERS["hydra"]
    layer = randomize(kind(32, kind.Config(**SMALL), causal=False, max_seqlen=512, output_std=0.02))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = count(monkeypatch, layer, tokens(False, torch.float32)[0])
    check(found, (3, 6), (10, 16))


def check(found, products, starts):
    """Forward and backward: the number of products and of all else, and that nothing is copied."""
    for (launches, others, number), most, expected, total in zip(found, (12, 16), products, starts, strict=True):
        assert len(launches) + others.total() == total <= most, (launches, others)
        assert not FORBIDDEN & set(others)
        assert number == expected
