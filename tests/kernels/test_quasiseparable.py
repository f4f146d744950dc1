"""The bidirectional scan against two flipped recurrences, and against its matrix written entry by entry."""

from __future__ import annotations

import pytest
import torch
from compare import assert_matches, packed, rmse_ratio
from hypothesis import given, settings
from hypothesis import strategies as st
from test_semiseparable import decays

from matmix.kernels import quasiseparable_scan
from matmix.kernels.semiseparable.chunked import quasiseparable_chunked
from matmix.kernels.semiseparable.definition import quasiseparable_definition, quasiseparable_matrix


def make(
    seqlen,
    *,
    batch=2,
    heads=4,
    groups=2,
    d_state=5,
    headdim=6,
    kind="token",
    scales=(1, 1),
    diagonal="token",
    states=0,
):
    torch.manual_seed(seqlen)
    inputs = {"v": torch.randn(batch, seqlen, heads, headdim)}
    for name in ("q_forward", "k_forward", "q_backward", "k_backward"):
        inputs[name] = torch.randn(batch, seqlen, groups, d_state)
    for name, scaled in zip(("forward", "backward"), scales, strict=True):
        inputs[f"log_decay_{name}"] = decays(kind, batch, seqlen, heads)
        if scaled:
            inputs[f"input_scale_{name}"] = torch.randn(batch, seqlen, heads)
        if states:
            inputs[f"initial_state_{name}"] = torch.randn(states, heads, d_state, headdim)
    if diagonal:
        inputs["diagonal"] = torch.randn(batch, seqlen, heads) if diagonal == "token" else torch.randn(heads)
    return inputs


@pytest.mark.parametrize("seqlen", [1, 7, 64, 129, 1000])
def test_lengths(seqlen):
    assert_matches(quasiseparable_scan, quasiseparable_definition, make(seqlen))


@pytest.mark.parametrize("kind", ["head", "none", "zero", "strong", "mixed"])
@pytest.mark.parametrize("shift", [True, False])
def test_decays(kind, shift):
    assert_matches(quasiseparable_scan, quasiseparable_definition, make(140, kind=kind), shift=shift)


@pytest.mark.parametrize("lengths", [[1, 7, 64, 129, 30], [1] * 9, [0, 70, 0, 1, 0]])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("shift", [True, False])
def test_packed_documents(lengths, states, shift):
    inputs = make(sum(lengths), batch=1, states=len(lengths) if states else 0)
    assert_matches(quasiseparable_scan, quasiseparable_definition, inputs, cu_seqlens=packed(lengths), shift=shift)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seqlen=st.integers(1, 90),
    groups=st.sampled_from([1, 2, 4]),
    chunk=st.sampled_from([None, 16, 32]),
    kind=st.sampled_from(["token", "head", "none", "mixed"]),
    scales=st.tuples(st.booleans(), st.booleans()),
    diagonal=st.sampled_from([None, "token", "head"]),
    shift=st.booleans(),
    states=st.booleans(),
    cuts=st.lists(st.integers(0, 90), max_size=5),
)
def test_any_combination(seqlen, groups, chunk, kind, scales, diagonal, shift, states, cuts):
    cuts = sorted({min(cut, seqlen) for cut in cuts})
    bounds = [0, *cuts, seqlen]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if cuts else None
    batch = 1 if cuts else 2
    rows = (len(bounds) - 1 if cuts else batch) if states else 0
    inputs = make(seqlen, batch=batch, groups=groups, kind=kind, scales=scales, diagonal=diagonal, states=rows)
    for op in (quasiseparable_scan, quasiseparable_chunked):
        assert_matches(
            op,
            quasiseparable_definition,
            inputs,
            op_options={"chunk_size": chunk},
            cu_seqlens=cu_seqlens,
            shift=shift,
        )


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("lengths", [None, [3, 1, 20, 9]])
def test_matrix(shift, lengths):
    """The op is the product with M; M's off-diagonal blocks have rank at most d_state."""
    inputs = make(33, batch=1, d_state=3)
    options = {"shift": shift, "cu_seqlens": None if lengths is None else packed(lengths)}
    matrix = quasiseparable_matrix(**{n: x for n, x in inputs.items() if n != "v"}, **options)
    y = torch.einsum("bhts,bshp->bthp", matrix, inputs["v"].double())
    assert rmse_ratio(quasiseparable_scan(**inputs, **options), y) < 1e-6
    assert torch.linalg.matrix_rank(matrix[..., 20:, :20]).max() <= 3
    assert torch.linalg.matrix_rank(matrix[..., :20, 20:]).max() <= 3


def test_shared_vectors_accumulate_gradients():
    """One tensor may serve as q of both directions."""
    inputs = make(40)
    shared = inputs["q_forward"]
    q = shared.clone().requires_grad_()
    y = quasiseparable_scan(**{**inputs, "q_forward": q, "q_backward": q})
    y.square().sum().backward()
    forward, backward = shared.clone().requires_grad_(), shared.clone().requires_grad_()
    quasiseparable_scan(**{**inputs, "q_forward": forward, "q_backward": backward}).square().sum().backward()
    assert rmse_ratio(q.grad, forward.grad + backward.grad) < 1e-6


@pytest.mark.parametrize("shift", [True, False])
def test_gradcheck(shift):
    inputs = make(9, heads=2, d_state=2, headdim=2, groups=1, states=2)
    inputs = {n: x.double().requires_grad_() for n, x in inputs.items()}

    def op(*tensors):
        return quasiseparable_scan(**dict(zip(inputs, tensors, strict=True)), shift=shift)

    assert torch.autograd.gradcheck(op, tuple(inputs.values()), fast_mode=True)


def test_documents_are_bit_independent():
    lengths = [5, 20, 1, 80, 30]
    inputs = make(sum(lengths), batch=1)
    cu_seqlens = packed(lengths)
    before = quasiseparable_scan(**inputs, cu_seqlens=cu_seqlens)
    changed = {n: x.clone() for n, x in inputs.items()}
    for name, x in changed.items():
        noise = torch.randn(x[:, 25:106].shape)
        x[:, 25:106] = -noise.abs() * 20 if name.startswith("log") else noise * 100
    after = quasiseparable_scan(**changed, cu_seqlens=cu_seqlens)
    assert torch.equal(before[:, :25], after[:, :25])
    assert torch.equal(before[:, 106:], after[:, 106:])
    assert not torch.equal(before[:, 25:106], after[:, 25:106])


def test_first_and_last_token_see_only_the_other_side():
    """With shift, an end token's output holds nothing of itself but the diagonal term."""
    inputs = make(20, diagonal=None)
    v = inputs["v"].clone().requires_grad_()
    quasiseparable_scan(**{**inputs, "v": v})[:, [0, -1]].sum().backward()
    y = quasiseparable_scan(**{**inputs, "v": v.detach().index_fill(1, torch.tensor([0]), 0.0)})
    same = quasiseparable_scan(**{**inputs, "v": v.detach()})
    assert torch.equal(y[:, 0], same[:, 0])
    assert v.grad[:, 1:-1].abs().sum() > 0
