"""Triton form of the matrix-product scan against the recurrence: outputs, final states, gradients.

Chunks are made short so that short sequences reach all levels of the scan over chunks.
"""

from __future__ import annotations

import compare
import pytest
import torch
from compare import on_triton, packed, rmse_ratio, run
from nightly import each_value_once, nightly
from test_matrix_product import make
from triton_on_cpu import PoisonedTorch

from matmix.kernels import matrix_product_scan
from matmix.kernels.launching import record_launches
from matmix.kernels.matrix_product import fused
from matmix.kernels.matrix_product.chunked import ProductInputs
from matmix.kernels.matrix_product.definition import matrix_product_definition


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    monkeypatch.setattr(fused, "torch", PoisonedTorch())


@pytest.fixture
def short(monkeypatch) -> None:
    monkeypatch.setattr(fused, "CHUNK", 4)


def on(device):
    return on_triton(matrix_product_scan, device)


def assert_matches(device, inputs, **options):
    compare.assert_matches(on(device), matrix_product_definition, inputs, **options)


@pytest.mark.parametrize(("seqlen", "chunk"), each_value_once([1, 2, 31, 64, 65, 130], [4, 64]))
def test_lengths(interpreter, monkeypatch, chunk, seqlen):
    monkeypatch.setattr(fused, "CHUNK", chunk)
    assert_matches(interpreter, make(seqlen, order=8, batch=1, states=1), return_final_state=True)


@pytest.mark.parametrize(("order", "heads"), each_value_once([4, 8, 16, 32], [5, 1]))
def test_orders_and_heads_that_do_not_fill_a_tile(interpreter, monkeypatch, order, heads):
    monkeypatch.setattr(fused, "CHUNK", 8)
    assert_matches(interpreter, make(20, order=order, heads=heads), return_final_state=True)


@pytest.mark.slow
def test_a_long_sequence(interpreter):
    assert_matches(interpreter, make(1000, order=8, heads=2, batch=1))


@pytest.mark.parametrize(
    ("lengths", "states", "reverse"),
    each_value_once([[1, 5, 64, 3, 0, 30], [1] * 9, [0, 70, 0, 1, 0], [100, 1]], [False, True], [False, True]),
)
def test_packed_documents(interpreter, monkeypatch, lengths, states, reverse):
    monkeypatch.setattr(fused, "CHUNK", 4)
    inputs = make(sum(lengths), batch=1, heads=2, states=len(lengths) if states else 0)
    options = {"cu_seqlens": packed(lengths), "return_final_state": True, "reverse": reverse}
    assert_matches(interpreter, inputs, **options)


def test_final_state_alone_has_a_gradient(interpreter, short):
    inputs = make(30, batch=1, states=1)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    on(interpreter)(**leaves, return_final_state=True)[1].square().sum().backward()
    exact = {name: x.double().requires_grad_() for name, x in inputs.items()}
    matrix_product_definition(**exact, return_final_state=True)[1].square().sum().backward()
    assert all(rmse_ratio(leaves[name].grad, exact[name].grad) <= 1e-5 for name in inputs)


def test_documents_are_bit_independent(interpreter, short):
    """A neighbour may even overflow: states, final states and gradients of the others stay as they are."""
    lengths = [5, 20, 1, 30]
    before = make(sum(lengths), batch=1)
    after = {"x": before["x"].clone()}
    after["x"][:, 5:25] = torch.nan
    found = [
        run(on(interpreter), inputs, torch.float32, cu_seqlens=packed(lengths), return_final_state=True)
        for inputs in (before, after)
    ]
    for name in ("output 0", "d x"):
        plain, changed = (x[name] for x in found)
        assert torch.equal(plain[:, :5], changed[:, :5])
        assert torch.equal(plain[:, 25:], changed[:, 25:])
        assert changed[:, 5:25].isnan().any()
    plain, changed = (x["output 1"] for x in found)
    assert torch.equal(plain[[0, 2, 3]], changed[[0, 2, 3]])


def test_the_same_bits_twice_from_any_layout(interpreter, short):
    inputs = make(40, order=8)
    wide = torch.randn(2, 40, 5, 8, 8)
    wide[:, :, 1:4] = inputs["x"]
    strided = wide[:, :, 1:4]
    time_first = inputs["x"].transpose(0, 1).contiguous().transpose(0, 1)
    first, *others = (run(on(interpreter), {"x": x}, torch.float32) for x in (inputs["x"], strided, time_first))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_half_precision_inputs_keep_a_float32_state(interpreter):
    """Only inputs and outputs are rounded: no error piles up along the sequence."""
    inputs = {"x": torch.linalg.qr(torch.randn(1, 300, 2, 8, 8))[0].bfloat16()}
    got = on(interpreter)(**inputs, return_final_state=True)
    wanted = matrix_product_definition(**inputs, return_final_state=True)
    assert got[0].dtype == torch.bfloat16
    assert rmse_ratio(got[0], wanted[0]) < 3e-3
    assert rmse_ratio(got[1], wanted[1]) < 1e-5


@pytest.mark.parametrize("packed_row", [False, True])
def test_no_value_is_looked_at(packed_row):
    """Tensors without values are enough to launch everything, at every level of a long row."""
    x = torch.empty(1, 100_000, 6, 8, 8, device="meta")
    cu_seqlens = torch.empty(90, dtype=torch.int32, device="meta") if packed_row else None
    with record_launches() as launches:
        given = ProductInputs(x, None, cu_seqlens, None)
        outputs = fused.forward(given)
        fused.backward(given, outputs, outputs._replace(h=torch.empty_like(outputs.h)))
    assert len(launches) == 4 + 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the tensor cores' arithmetic needs a GPU")
@pytest.mark.parametrize("order", [4, 8, 16, 32])
def test_thousands_of_steps_lose_little_on_tensor_cores(order):
    """Float32 states by products in tf32x3; bfloat16 states would be off by a third, plain tf32 by 4 %."""
    x = torch.linalg.qr(torch.randn(2, 4096, 3, order, order))[0].contiguous()
    h = matrix_product_scan(x.cuda()).cpu()
    assert rmse_ratio(h[:, -1], matrix_product_definition(x)[:, -1]) <= 1e-4


@pytest.mark.parametrize("order", [nightly(4), nightly(8), 16])
def test_thousands_of_steps_lose_little(order):
    """The same for the PyTorch form, whose arithmetic is plain float32."""
    x = torch.linalg.qr(torch.randn(1, 4096, 2, order, order))[0].contiguous()
    assert rmse_ratio(matrix_product_scan(x)[:, -1], matrix_product_definition(x)[:, -1]) <= 1e-4
