"""Triton form of products of matrices, and of the MRU mixer, over rows that several ranks hold parts of."""

from __future__ import annotations

import functools

import pytest
import torch
from mru_inputs import FUSED, mixer_inputs
from nightly import each_value_once, nightly
from parts_scenario import Case, check_parts, of_documents, run_part
from ranks_in_threads import RanksInThreads
from triton_on_cpu import PoisonedTorch

from matmix.kernels.matrix_product import fused as scan
from matmix.kernels.matrix_product import parts
from matmix.kernels.matrix_product.definition import matrix_product_definition
from matmix.kernels.mru import fused
from matmix.kernels.mru.definition import mru_mixer_definition

BOUNDS = {"rows": None, "one": [0, 24], "cuts": [0, 6, 8, 12, 24], "short": [0, 1, 2, 21, 23, 24]}


@pytest.fixture(autouse=True)
def short(monkeypatch, interpreter) -> None:
    """Chunks of 4 tokens, groups of 2: the same loops over fewer tokens."""
    if interpreter != "cpu":
        pytest.skip("threads are ranks of the interpreter's")
    monkeypatch.setattr(fused, "torch", PoisonedTorch())
    monkeypatch.setattr(scan, "torch", PoisonedTorch())
    monkeypatch.setattr(scan, "CHUNK", 4)
    monkeypatch.setattr(fused, "GROUP", 2)


def in_threads(monkeypatch, ranks, calls: list[tuple]) -> list:
    """What `parts_scenario.run_parts` would return on each rank."""

    def run_all(context):
        return [run_part(context, *call) for call in calls]

    return RanksInThreads(monkeypatch, ranks, parts).run(run_all)


def check(monkeypatch, ranks, operation, inputs, bounds, definition, **options):
    wanted = functools.partial(definition, return_final_state=True, **options)
    options |= {"return_final_state": True, "backend": "triton"}
    case = Case(operation, inputs, of_documents(bounds)[2], options, wanted)
    check_parts({"case": case}, ranks, 5e-5, run=functools.partial(in_threads, monkeypatch, ranks))


@pytest.mark.parametrize(("ranks", "name", "states"), each_value_once([2, 3, 4], list(BOUNDS), [True, False]))
def test_products(monkeypatch, ranks, name, states):
    batch, rows, _ = of_documents(BOUNDS[name])
    inputs = {"x": torch.linalg.qr(torch.randn(batch, 24, 3, 4, 4))[0]}
    inputs |= {"initial_state": torch.randn(rows, 3, 4, 4)} if states else {}
    check(monkeypatch, ranks, "matrix_product_scan", inputs, BOUNDS[name], matrix_product_definition)


@pytest.mark.parametrize("levels", [1, 3])
def test_parts_of_one_chunk_and_of_many(monkeypatch, levels):
    length = 3 * 4**levels
    inputs = {"x": torch.linalg.qr(torch.randn(1, length, 1, 4, 4))[0]}
    check(monkeypatch, 3, "matrix_product_scan", inputs, [0, 2, length], matrix_product_definition)


@pytest.mark.parametrize(
    ("ranks", "name", "construction", "chunks"), each_value_once([2, 3, 4], list(BOUNDS), FUSED, [0, 4])
)
def test_mixers(monkeypatch, ranks, name, construction, chunks):
    batch, rows, _ = of_documents(BOUNDS[name])
    states = rows if construction != "affine" else 0
    inputs = mixer_inputs(24, construction, batch=batch, heads=2, states=states, d_chunk=chunks)
    check(monkeypatch, ranks, "mru_mixer", inputs, BOUNDS[name], mru_mixer_definition, construction=construction)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("spoilt", [nightly(at, condition=at != 1) for at in range(4)])
def test_nan_stays_in_its_document(monkeypatch, spoilt):
    bounds, calls = [0, 7, 8, 17, 24], []
    inputs = mixer_inputs(24, "affine", batch=1, heads=1)
    clean = torch.ones(24, dtype=torch.bool)
    clean[bounds[spoilt] : bounds[spoilt + 1]] = False
    cotangents = [torch.randn(1, 24, 1, 4, 4) * clean.view(1, 24, 1, 1, 1)]
    for value in (0.0, torch.nan):
        given = inputs | {"elements": inputs["elements"].masked_fill(~clean.view(1, 24, 1, 1), value)}
        options = {"construction": "affine", "backend": "triton"}
        calls.append(("mru_mixer", given, cotangents, of_documents(bounds)[2], options))
    results = in_threads(monkeypatch, 3, calls)
    for read in (lambda result: result[0][0], lambda result: result[1]["elements"]):
        zero, poisoned = (torch.cat([read(rank[call]) for rank in results], 1)[:, clean] for call in (0, 1))
        assert torch.equal(zero, poisoned)
