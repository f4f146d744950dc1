"""Triton form of the MRU mixer against its definition: outputs, final states, gradients.

Chunks are made short so that short sequences reach all levels of the scan over chunks.
"""

from __future__ import annotations

import pytest
import torch
from compare import packed, rmse_ratio, run
from triton_on_cpu import PoisonedTorch

from matmix.kernels import mru_mixer, mru_step
from matmix.kernels.launching import record_launches
from matmix.kernels.matrix_product import fused as scan
from matmix.kernels.mru import fused
from matmix.kernels.mru.constructions import state_elements
from matmix.kernels.mru.definition import mru_mixer_definition

CONSTRUCTIONS = ["identity_plus", "ldu", "cayley"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(fused, "torch", PoisonedTorch())
    monkeypatch.setattr(scan, "torch", PoisonedTorch())


@pytest.fixture(params=[4, 64])
def chunk(request, monkeypatch) -> int:
    monkeypatch.setattr(scan, "CHUNK", request.param)
    return request.param


def make(seqlen, construction, *, batch=2, heads=3, order=4, width=4, states=0):
    """Elements whose products stay bounded: small ones, but for orthogonal matrices."""
    torch.manual_seed(seqlen)
    size = 0.7 if construction == "cayley" else 0.3 / max(seqlen, 16) ** 0.5
    inputs = {
        "elements": torch.randn(batch, seqlen, heads, state_elements(construction, order)) * size,
        "w_down": torch.randn(heads, order, width),
    }
    if states:
        inputs["initial_state"] = torch.randn(states, heads, order, order)
    return inputs


def on(device):
    def call(**inputs):
        moved = {name: x.to(device) if torch.is_tensor(x) else x for name, x in inputs.items()}
        outputs = mru_mixer(**moved, backend="triton")
        return tuple(y.cpu() for y in outputs) if isinstance(outputs, tuple) else outputs.cpu()

    return call


def assert_matches(device, inputs, tolerance=1e-5, **options):
    got = run(on(device), inputs, torch.float32, **options)
    wanted = run(mru_mixer_definition, inputs, torch.float64, **options)
    errors = {name: rmse_ratio(got[name], wanted[name]) for name in wanted}
    assert all(error <= tolerance for error in errors.values()), errors


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("seqlen", [1, 2, 31, 64, 65])
def test_lengths(interpreter, construction, seqlen):
    inputs = make(seqlen, construction, order=8, batch=1, heads=2, width=8, states=1)
    assert_matches(interpreter, inputs, construction=construction, return_final_state=True)
