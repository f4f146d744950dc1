"""The MRU mixer in PyTorch against its definition, its parts, and itself token by token."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from compare import assert_bit_equal_twice, assert_matches, packed, rmse_ratio
from mru_inputs import FUSED, mixer_inputs
from nightly import each_value_once

from matmix.kernels import matrix_product_scan, mru_mixer, mru_mixer_is_fused, mru_step
from matmix.kernels.mru.chunked import (
    chunks_gradient,
    elements_from_chunks,
    log_norms,
    mru_mixer_torch,
    scan_log_norms,
    summary,
)
from matmix.kernels.mru.constructions import CONSTRUCTIONS, build_state_matrices, state_elements
from matmix.kernels.mru.definition import elements_definition, mru_mixer_definition
from matmix.kernels.mru.op import no_kernel

recomputing = functools.partial(mru_mixer, backend="torch")
FORMS = {"parts": mru_mixer, "recomputing": recomputing, "exported": mru_mixer_torch}


@pytest.mark.parametrize(
    ("op", "construction", "seqlen"), each_value_once(list(FORMS), FUSED, [1, 2, 31, 64, 65, 1000])
)
def test_lengths(op, construction, seqlen):
    inputs = mixer_inputs(seqlen, construction, order=8, width=5, states=2)
    assert_matches(FORMS[op], mru_mixer_definition, inputs, construction=construction, return_final_state=True)


@pytest.mark.parametrize(("construction", "order"), each_value_once(FUSED, [4, 16, 32]))
def test_orders(construction, order):
    inputs = mixer_inputs(40, construction, order=order, heads=2)
    assert_matches(recomputing, mru_mixer_definition, inputs, construction=construction)


@pytest.mark.parametrize(
    ("construction", "lengths", "states", "d_chunk"),
    each_value_once(FUSED, [[1, 5, 64, 3, 0, 130], [1] * 9, [0, 70, 0, 1, 0]], [True, False], [0, 3]),
)
def test_packed_documents(construction, lengths, states, d_chunk):
    states = len(lengths) if states else 0
    inputs = mixer_inputs(sum(lengths), construction, batch=1, states=states, d_chunk=d_chunk)
    options = {"cu_seqlens": packed(lengths), "return_final_state": True, "construction": construction}
    for op in (mru_mixer, recomputing):
        assert_matches(op, mru_mixer_definition, inputs, **options)


@pytest.mark.parametrize(
    ("op", "construction", "sizes"),
    each_value_once(list(FORMS), FUSED, [(1, 8, 8), (2, 4, 1), (31, 16, 7), (97, 8, 12)]),
)
def test_chunks(op, construction, sizes):
    seqlen, order, d_chunk = sizes
    inputs = mixer_inputs(seqlen, construction, order=order, width=5, states=2, d_chunk=d_chunk)
    assert_matches(FORMS[op], mru_mixer_definition, inputs, construction=construction, return_final_state=True)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_every_construction_takes_chunks(construction):
    """Elements are M row by row, or the strictly lower triangle of (M - M^T) / sqrt(2)."""
    chunks, w_up = torch.randn(2, 5, 3, 6, 4, dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64)
    m = torch.einsum("blhic,hcj->blhij", chunks, w_up)
    if construction in ("cayley", "householder"):
        wanted = torch.stack([(m[..., i, j] - m[..., j, i]) / 2**0.5 for i in range(6) for j in range(i)], -1)
    else:
        wanted = m.flatten(-2)
    torch.testing.assert_close(elements_from_chunks(chunks, w_up, construction), wanted)
    torch.testing.assert_close(elements_definition(chunks, w_up, construction), wanted)
    chunks.requires_grad_()
    w_up.requires_grad_()
    found = elements_from_chunks(chunks, w_up, construction)
    cotangent = torch.randn_like(found)
    expected = torch.autograd.grad(found, (chunks, w_up), cotangent)
    torch.testing.assert_close(chunks_gradient(cotangent, chunks, w_up, construction), expected)


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_any_construction_is_its_parts(construction):
    """Outputs and gradients are those of state matrices, scan and product, one after the other."""
    inputs = mixer_inputs(50, construction, order=8, states=2)

    def parts(elements, w_down, initial_state):
        x = build_state_matrices(elements, construction, 8)
        h = matrix_product_scan(x, initial_state=initial_state)
        return torch.einsum("blhij,hjc->blhic", h, w_down)

    def mixer(**given):
        return mru_mixer(**given, construction=construction)

    assert_matches(mixer, parts, inputs)


@pytest.mark.parametrize("construction", FUSED)
def test_gradcheck(construction):
    inputs = mixer_inputs(5, construction, batch=1, heads=1, width=3, states=1)
    leaves = [x.double().requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(
        lambda e, w, h: recomputing(e, w, initial_state=h, return_final_state=True, construction=construction), leaves
    )


@pytest.mark.parametrize("construction", FUSED)
def test_the_same_bits_twice(construction):
    assert_bit_equal_twice(recomputing, mixer_inputs(70, construction, states=2), construction=construction)


@pytest.mark.parametrize("construction", FUSED)
def test_documents_are_bit_independent(construction):
    lengths = [5, 20, 1, 30]
    inputs = mixer_inputs(sum(lengths), construction, batch=1)
    changed = inputs["elements"].clone()
    changed[:, 5:25] = torch.nan
    found = []
    for elements in (inputs["elements"], changed):
        elements = elements.clone().requires_grad_()
        y = recomputing(elements, inputs["w_down"], construction=construction, cu_seqlens=packed(lengths))
        found.append((y.detach(), torch.autograd.grad(y.sum(), elements)[0]))
    for plain, other in zip(*found, strict=True):
        assert torch.equal(plain[:, :5], other[:, :5])
        assert torch.equal(plain[:, 25:], other[:, 25:])
        assert other[:, 5:25].isnan().any()


def test_the_backward_pass_keeps_the_elements_alone():
    saved = []
    inputs = mixer_inputs(512, "cayley", order=8)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        recomputing(**leaves)
    given = {x.untyped_storage().data_ptr() for x in leaves.values()}
    assert sum(x.numel() for x in saved if x.untyped_storage().data_ptr() not in given) == 0


def test_autocast_does_not_reach_the_states():
    inputs = mixer_inputs(300, "cayley", order=8)
    for op in (mru_mixer, recomputing):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, final = op(**inputs, return_final_state=True)
        wanted = op(**inputs, return_final_state=True)
        assert torch.equal(y, wanted[0])
        assert torch.equal(final, wanted[1])


@pytest.mark.parametrize(
    ("construction", "projected", "d_chunk"), each_value_once(CONSTRUCTIONS, [False, True], [0, 3, 3])
)
def test_steps_are_the_sequence(construction, projected, d_chunk):
    """Tokens one by one, from the identity."""
    inputs = mixer_inputs(32 if d_chunk else 256, construction, order=8, d_chunk=d_chunk)
    weights = {"w_up": inputs["w_up"]} if d_chunk else {}
    y, final = mru_mixer(**inputs, construction=construction, return_final_state=True)
    state, steps = torch.eye(8).expand(2, 3, 8, 8).contiguous(), []
    for elements in inputs["elements"].unbind(1):
        if projected:
            y_t, state = mru_step(elements, state, inputs["w_down"], construction=construction, **weights)
        else:
            state = mru_step(elements, state, construction=construction, **weights)
            y_t = torch.einsum("bhij,hjc->bhic", state, inputs["w_down"])
        steps.append(y_t)
    # Either way rounds each state, sums of 8 products, by 2^-24 times a few: 256 of them in a row are 1e-4 at worst.
    torch.testing.assert_close(torch.stack(steps, 1), y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-4)


def test_log_norms_of_states_of_any_size():
    states = torch.randn(5, 4, 4, dtype=torch.float64)
    wanted = torch.linalg.matrix_norm(states).log()
    for scale in (1.0, 1e-30, 1e30):
        found = log_norms((states * scale).float())
        torch.testing.assert_close(found.double(), wanted + math.log(scale), rtol=1e-6, atol=1e-5)
    assert log_norms(torch.zeros(4, 4)).isfinite()
    states[0, 1, 2], states[1, 0, 0] = torch.inf, torch.nan
    assert log_norms(states)[0] == torch.inf
    assert log_norms(states)[1].isnan()
    assert log_norms(states)[2:].isfinite().all()


def test_summary_leaves_out_what_is_not_there():
    assert summary(torch.tensor([1.0, -torch.inf, 3.0])).tolist() == [3.0, 2.0]
    assert summary(torch.tensor([1.0, torch.nan])).isnan().all()


def test_reported_norms():
    """Exactly sqrt(o) with orthogonal state matrices; growing with those that are not."""
    options = {"return_log_norms": True}
    _, norms = recomputing(**mixer_inputs(200, "cayley", order=16), **options)
    torch.testing.assert_close(norms, torch.full((2,), math.log(4.0)), rtol=1e-5, atol=1e-5)
    inputs = mixer_inputs(200, "identity_plus", order=4)
    inputs["elements"] = torch.eye(4).flatten().expand(2, 200, 3, 16).clone() * 0.5
    _, final, norms = recomputing(**inputs, construction="identity_plus", return_final_state=True, **options)
    torch.testing.assert_close(norms[0], log_norms(final).max())
    # States at 64, 128, 192 and 200 tokens.
    torch.testing.assert_close(norms[1], torch.tensor(146.0 * math.log(1.5) + math.log(2.0)), rtol=1e-5, atol=0)
    h = matrix_product_scan(torch.eye(4).mul(1.5).expand(2, 200, 3, 4, 4))
    torch.testing.assert_close(scan_log_norms(h, h[:, -1]), norms, rtol=1e-5, atol=0)


def test_nothing_is_fused_on_a_cpu():
    inputs = mixer_inputs(5, "cayley")
    assert not mru_mixer_is_fused(inputs["elements"], inputs["w_down"], "cayley")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the tensor cores' arithmetic needs a GPU")
@pytest.mark.parametrize("order", [4, 8, 16])
def test_fused_states_lose_little_over_thousands_of_steps(order):
    inputs = mixer_inputs(4096, "cayley", order=order)
    _, final = mru_mixer(**{name: x.cuda() for name, x in inputs.items()}, return_final_state=True)
    assert rmse_ratio(final.cpu(), mru_mixer_definition(**inputs, return_final_state=True)[1]) <= 1e-4


def test_cayley_has_no_kernel_on_amds_gpus(monkeypatch):
    elements, w_down = torch.randn(1, 4, 2, state_elements("cayley", 4)), torch.randn(2, 4, 5)
    assert no_kernel(elements, w_down, "cayley") == ""
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert no_kernel(elements, w_down, "cayley") == "builds cayley on NVIDIA's GPUs only"
    assert no_kernel(torch.randn(1, 4, 2, 8), w_down, "affine") == ""
