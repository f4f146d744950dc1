"""Triton form of products of matrices, and of the MRU mixer, over rows that several ranks hold parts of."""

from __future__ import annotations

import pytest
import torch
from compare import FLOAT32
from mru_inputs import FUSED, mixer_inputs
from nightly import each_value_once
from parts import part_errors
from ranks_in_threads import RanksInThreads
from triton_on_cpu import PoisonedTorch

from matmix.kernels import matrix_product_scan, mru_mixer
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


def assert_matches(monkeypatch, ranks, op, definition, inputs, **options):
    group = RanksInThreads(monkeypatch, ranks, parts)

    def errors(context):
        return part_errors(
            context, op, definition, inputs, group.summed, dtype=torch.float32, return_final_state=True, **options
        )

    for of_rank in group.run(errors):
        assert all(error <= FLOAT32 for error in of_rank.values()), of_rank


@pytest.mark.parametrize(("ranks", "name", "states"), each_value_once([2, 3, 4], list(BOUNDS), [True, False]))
def test_products(monkeypatch, ranks, name, states):
    bounds = BOUNDS[name]
    batch, rows = (2, 2) if bounds is None else (1, len(bounds) - 1)
    inputs = {"x": torch.linalg.qr(torch.randn(batch, 24, 3, 4, 4))[0]}
    inputs |= {"initial_state": torch.randn(rows, 3, 4, 4)} if states else {}

    def op(**given):
        return matrix_product_scan(**given, backend="triton")

    assert_matches(monkeypatch, ranks, op, matrix_product_definition, inputs, bounds=bounds)


@pytest.mark.parametrize("levels", [1, 3])
def test_parts_of_one_chunk_and_of_many(monkeypatch, levels):
    length = 3 * 4**levels
    inputs = {"x": torch.linalg.qr(torch.randn(1, length, 1, 4, 4))[0]}

    def op(**given):
        return matrix_product_scan(**given, backend="triton")

    assert_matches(monkeypatch, 3, op, matrix_product_definition, inputs, bounds=[0, 2, length])


@pytest.mark.parametrize(
    ("ranks", "name", "construction", "chunks"), each_value_once([2, 3, 4], list(BOUNDS), FUSED, [0, 4])
)
def test_mixers(monkeypatch, ranks, name, construction, chunks):
    bounds = BOUNDS[name]
    batch, rows = (2, 2) if bounds is None else (1, len(bounds) - 1)
    states = rows if construction != "affine" else 0
    inputs = mixer_inputs(24, construction, batch=batch, heads=2, states=states, d_chunk=chunks)
    options = {"bounds": bounds, "construction": construction, "shared": tuple(inputs.keys() & {"w_down", "w_up"})}

    def op(**given):
        return mru_mixer(**given, backend="triton")

    assert_matches(monkeypatch, ranks, op, mru_mixer_definition, inputs, **options)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("spoilt", range(4))
def test_nan_stays_in_its_document(monkeypatch, spoilt):
    inputs = mixer_inputs(24, "affine", batch=1, heads=1)
    options = {"bounds": [0, 7, 8, 17, 24], "construction": "affine", "shared": ("w_down",), "spoilt": spoilt}

    def op(**given):
        return mru_mixer(**given, backend="triton")

    assert_matches(monkeypatch, 3, op, mru_mixer_definition, inputs, **options)
