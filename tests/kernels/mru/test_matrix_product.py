"""The matrix-product scan against its recurrence and the golden files."""

from __future__ import annotations

import pytest
import torch
from compare import assert_matches, assert_refused, packed, rmse_ratio
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import each_value_once
from paths import GOLDEN
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from matmix.kernels import matrix_product_scan
from matmix.kernels.matrix_product.chunked import matrix_product_chunked
from matmix.kernels.matrix_product.definition import matrix_product_definition
from matmix.kernels.matrix_product.scans import WALKS


def make(seqlen, *, batch=2, heads=3, order=4, states=0):
    """Nearly orthogonal matrices: their products neither grow nor vanish."""
    x = torch.linalg.qr(torch.randn(batch, seqlen, heads, order, order))[0].contiguous()
    inputs = {"x": x + 0.01 * torch.randn_like(x)}
    if states:
        inputs["initial_state"] = torch.randn(states, heads, order, order)
    return inputs


@pytest.mark.parametrize(("seqlen", "order"), each_value_once([1, 2, 31, 64, 65, 129, 1000], [4, 8]))
def test_lengths(seqlen, order):
    inputs = make(seqlen, order=order, states=2)
    assert_matches(matrix_product_scan, matrix_product_definition, inputs, return_final_state=True)


@pytest.mark.parametrize("order", [16, 32])
def test_orders(order):
    assert_matches(matrix_product_scan, matrix_product_definition, make(40, order=order))
    assert_matches(matrix_product_chunked, matrix_product_definition, make(40, order=order - 13))


@pytest.mark.parametrize(
    ("lengths", "states", "reverse", "order"),
    each_value_once(
        [[1, 7, 64, 129, 30], [1] * 9, [0, 70, 0, 1, 0], [200, 1, 1, 40]], [True, False], [False, True, True], [4, 16]
    ),
)
def test_packed_documents(lengths, states, reverse, order):
    inputs = make(sum(lengths), batch=1, order=order, states=len(lengths) if states else 0)
    assert_matches(
        matrix_product_scan,
        matrix_product_definition,
        inputs,
        cu_seqlens=packed(lengths),
        return_final_state=True,
        reverse=reverse,
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seqlen=st.integers(1, 70),
    order=st.sampled_from([4, 8]),
    chunk=st.sampled_from([None, 1, 5, 16, 100]),
    states=st.booleans(),
    final=st.booleans(),
    reverse=st.booleans(),
    cuts=st.lists(st.integers(0, 70), max_size=5),
)
def test_any_combination(seqlen, order, chunk, states, final, reverse, cuts):
    cuts = sorted({min(cut, seqlen) for cut in cuts})
    bounds = [0, *cuts, seqlen]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if cuts else None
    batch = 1 if cuts else 2
    rows = (len(bounds) - 1 if cuts else batch) if states else 0
    inputs = make(seqlen, batch=batch, order=order, states=rows)
    for op in (matrix_product_scan, matrix_product_chunked):
        assert_matches(
            op,
            matrix_product_definition,
            inputs,
            op_options={"chunk_size": chunk},
            cu_seqlens=cu_seqlens,
            return_final_state=final,
            reverse=reverse,
        )


@pytest.mark.parametrize("name", ["mru_scan_1_4", "mru_scan_7_4", "mru_scan_33_8"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_golden(name, dtype, tolerance):
    """Files hold (batch, heads, length, o, o)."""
    golden = {key: x.transpose(1, 2) for key, x in load_file(GOLDEN / f"{name}.safetensors").items()}
    x = golden["X"].to(dtype).requires_grad_()
    h = matrix_product_scan(x)
    h.backward(golden["dH"].to(dtype))
    assert rmse_ratio(h, golden["H"]) < tolerance
    assert rmse_ratio(x.grad, golden["dX"]) < tolerance


@pytest.mark.parametrize("scan", WALKS)
def test_scans_of_mru_lm_are_the_definition_with_every_gradient(scan):
    """In float64 to rounding, at lengths around powers of two, forwards and backwards, of documents too."""
    exact = {"dtype": torch.float64, "tolerance": 1e-13, "op_options": {"scan": scan}, "return_final_state": True}
    for number, seqlen in enumerate([1, 2, 3, 5, 8, 13, 16, 31, 65]):
        inputs = make(seqlen, states=2 * (number % 2))
        assert_matches(matrix_product_scan, matrix_product_definition, inputs, reverse=number % 4 > 1, **exact)
    for number, lengths in enumerate([[1, 7, 16, 33, 8], [1] * 6, [0, 17, 0, 1, 0], [3, 1, 1, 20], [9]]):
        for states in (0, len(lengths)):
            inputs = make(sum(lengths), batch=1, states=states)
            options = {"cu_seqlens": packed(lengths), "reverse": bool((number + states) % 2)}
            assert_matches(matrix_product_scan, matrix_product_definition, inputs, **options, **exact)


@pytest.mark.parametrize("scan", WALKS)
def test_scans_of_mru_lm_keep_float32_states_and_the_counts_of_the_readme(scan):
    x = make(64, batch=1, heads=1)["x"].bfloat16()
    h, final = matrix_product_scan(x, scan=scan, return_final_state=True)
    wanted, end = matrix_product_definition(x, return_final_state=True)
    assert h.dtype == torch.bfloat16
    assert rmse_ratio(final, end) < 1e-5
    assert rmse_ratio(h, wanted) < 4e-3
    with FlopCounterMode(display=False) as counter:
        matrix_product_scan(x, scan=scan)
    # Of 64 tokens: s - 1 products, 2 s - 2 - log2(s), and the sum of s - 2^i.
    products = {"sequential": 63, "brent_kung": 120, "hillis_steele": 6 * 64 - 63}
    assert counter.get_total_flops() == 2 * 4**3 * products[scan]


def test_scans_of_mru_lm_refuse_what_only_chunks_have():
    x = make(8)["x"]
    assert_refused(
        {
            "use 'chunked' or 'brent_kung'": lambda: matrix_product_scan(x, scan="blelloch"),
            "scan='sequential' with a chunk_size": lambda: matrix_product_scan(x, scan="sequential", chunk_size=4),
            'only scan="chunked" takes these': lambda: matrix_product_scan(x, scan="brent_kung", backend="triton"),
        }
    )


def test_gradient_through_the_final_state_only():
    inputs = make(20)
    grads = []
    for op in (matrix_product_scan, matrix_product_definition):
        x = inputs["x"].double().requires_grad_()
        op(x, return_final_state=True)[1].square().sum().backward()
        grads.append(x.grad)
    assert rmse_ratio(*grads) < 1e-12


def test_gradcheck():
    inputs = {n: x.double().requires_grad_() for n, x in make(7, heads=1, order=4, states=2).items()}
    assert torch.autograd.gradcheck(
        lambda x, h: matrix_product_scan(x, initial_state=h, return_final_state=True), tuple(inputs.values())
    )


@pytest.mark.parametrize(("order", "scan"), [(8, "chunked"), (16, "chunked"), *((4, scan) for scan in WALKS)])
def test_documents_are_bit_independent_even_of_overflow(order, scan):
    lengths = [5, 20, 1, 80, 30]
    x = make(sum(lengths), batch=1, order=order)["x"]
    cu_seqlens = packed(lengths)
    weight = torch.randn_like(x)

    def outputs(x):
        x = x.clone().requires_grad_()
        h = matrix_product_scan(x, cu_seqlens=cu_seqlens, scan=scan)
        grad = torch.autograd.grad(h, x, weight)[0]
        return h.detach(), grad

    changed = x.clone()
    changed[:, 26:106] *= 1e30
    for before, after in zip(outputs(x), outputs(changed), strict=True):
        assert torch.equal(before[:, :26], after[:, :26])
        assert torch.equal(before[:, 106:], after[:, 106:])
        assert not after[:, 26:106].isfinite().all()


def test_bfloat16_keeps_float32_states():
    x = make(600, order=8)["x"].bfloat16()
    h, final = matrix_product_scan(x, return_final_state=True)
    wanted, end = matrix_product_definition(x, return_final_state=True)
    assert h.dtype == torch.bfloat16
    assert rmse_ratio(final, end) < 1e-5
    assert rmse_ratio(h, wanted) < 4e-3


@pytest.mark.parametrize("order", [4, 16])
def test_final_states_of_packed_bfloat16_are_not_rounded(order):
    lengths = [5, 0, 70, 1, 80, 30]
    x = make(sum(lengths), batch=1, order=order)["x"].bfloat16()
    options = {"cu_seqlens": packed(lengths), "return_final_state": True}
    assert rmse_ratio(matrix_product_scan(x, **options)[1], matrix_product_definition(x, **options)[1]) < 1e-5


def test_strided_input():
    x = make(40)["x"]
    wanted = matrix_product_scan(x)
    # Libraries may sum products of other layouts in another order.
    for strided in (x.transpose(1, 2).contiguous().transpose(1, 2), x.mT.contiguous().mT):
        assert rmse_ratio(matrix_product_scan(strided), wanted) < 1e-5
