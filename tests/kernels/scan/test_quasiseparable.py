"""The bidirectional scan against two flipped recurrences, and against its matrix written entry by entry."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from compare import FLOAT32, assert_bit_equal_twice, assert_matches, packed, rmse_ratio
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import each_value_once, nightly
from test_semiseparable import CHUNKS, DECAYS, DOCUMENTS, LENGTHS, decays
from test_semiseparable import make as make_causal

from matmix.kernels import quasiseparable_scan, semiseparable_scan
from matmix.kernels.semiseparable.chunked import quasiseparable_chunked
from matmix.kernels.semiseparable.definition import quasiseparable_definition, quasiseparable_matrix

FORMS = {
    "hydra": {},
    "unshifted": {"shift": False},
    "halved": {"shift": False, "self_term": "mean"},
    "product": {"combine": "mult"},
    "unshifted product": {"combine": "mult", "shift": False},
    "both": {"combine": "concat"},
    "unshifted both": {"combine": "concat", "shift": False},
    "lion": {"shift": False, "self_term": "mean", "normalize": "row_sum", "gate_offset": 1, "eps": 0.2},
    "normalised": {"normalize": "row_sum", "eps": 0.5},
    "unshifted normalised": {"shift": False, "normalize": "row_sum", "eps": 0.2},
    "offset": {"gate_offset": 1},
}
"""Every option at least once, and those that meet in one layer together. With a tiny eps, a token that sees only
itself has y = v whatever its weight is: the weight's gradient would be nothing but rounding.
"""
SOME_FORMS = [nightly(form, condition=form not in ("hydra", "unshifted both", "lion")) for form in FORMS]
"""All forms, of which three run by day: together they hold every branch of the passes."""


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
    scale=1.0,
    diagonal="token",
    states=0,
    positive=False,
):
    """`positive`: everything that mixer weights are made of, for row sums that are far from zero."""

    def weight(*shape):
        return torch.rand(*shape) + 0.1 if positive else torch.randn(*shape)

    inputs = {"v": torch.randn(batch, seqlen, heads, headdim)}
    for name in ("q_forward", "k_forward", "q_backward", "k_backward"):
        inputs[name] = weight(batch, seqlen, groups, d_state)
    for name, scaled in zip(("forward", "backward"), scales, strict=True):
        inputs[f"log_decay_{name}"] = decays(kind, batch, seqlen, heads)
        if scaled:
            inputs[f"input_scale_{name}"] = scale * weight(batch, seqlen, heads)
        if states:
            inputs[f"initial_state_{name}"] = weight(states, heads, d_state, headdim + positive)
    if diagonal:
        inputs["diagonal"] = weight(batch, seqlen, heads) if diagonal == "token" else weight(heads)
    return inputs


def make_for(form: str, seqlen: int, *, states: int = 0, **options):
    """`make` for one of FORMS: a normaliser wants positive weights."""
    return make(seqlen, states=states, positive="normalize" in FORMS[form], **options)


@pytest.mark.parametrize(("form", "seqlen"), each_value_once(list(FORMS), LENGTHS))
def test_lengths(form, seqlen):
    heads = 2 if seqlen == 1000 else 4
    inputs = make_for(form, seqlen, batch=1, heads=heads, states=1)
    assert_matches(quasiseparable_scan, quasiseparable_definition, inputs, **FORMS[form])


@pytest.mark.parametrize(("form", "kind"), each_value_once(list(FORMS), DECAYS))
def test_decays(form, kind):
    inputs = make_for(form, 140, kind=kind, diagonal="head")
    assert_matches(quasiseparable_scan, quasiseparable_definition, inputs, **FORMS[form])


@pytest.mark.parametrize(("form", "groups"), each_value_once(list(FORMS), [1, 2, 4]))
def test_groups_and_large_steps(form, groups):
    """Heads share q and k in groups; input scales of about 50."""
    inputs = make_for(form, 90, groups=groups, scale=50.0, diagonal=None)
    assert_matches(quasiseparable_scan, quasiseparable_definition, inputs, **FORMS[form])


@pytest.mark.parametrize(("form", "lengths"), each_value_once(list(FORMS), [None, [1, 64, 0, 35]]))
def test_states_on_both_sides(form, lengths):
    """Of a normaliser they have a column for the sums of rows."""
    batch, states = (2, 2) if lengths is None else (1, len(lengths))
    inputs = make(100, batch=batch, heads=2, groups=1, states=states, positive="normalize" in FORMS[form])
    options = FORMS[form] | {"return_final_states": True, "cu_seqlens": lengths and packed(lengths)}
    assert_matches(quasiseparable_scan, quasiseparable_definition, inputs, **options)


@pytest.mark.parametrize(("form", "lengths", "states"), each_value_once(list(FORMS), DOCUMENTS, [False, True]))
def test_packed_documents(form, lengths, states):
    inputs = make_for(form, sum(lengths), batch=1, states=len(lengths) if states else 0)
    assert_matches(quasiseparable_scan, quasiseparable_definition, inputs, cu_seqlens=packed(lengths), **FORMS[form])


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seqlen=st.integers(1, 90),
    groups=st.sampled_from([1, 2, 4]),
    chunk=st.sampled_from(CHUNKS),
    kind=st.sampled_from(DECAYS),
    scales=st.tuples(st.booleans(), st.booleans()),
    diagonal=st.sampled_from([None, "token", "head"]),
    shift=st.booleans(),
    combine=st.sampled_from(["add", "add", "mult", "concat"]),
    self_term=st.sampled_from(["sum", "mean"]),
    normalize=st.sampled_from([None, "row_sum"]),
    eps=st.sampled_from([0.1, 1.0]),
    gate_offset=st.sampled_from([0, 1]),
    states=st.booleans(),
    cuts=st.lists(st.integers(0, 90), max_size=5),
)
def test_any_combination(
    seqlen, groups, chunk, kind, scales, diagonal, shift, combine, self_term, normalize, eps, gate_offset, states, cuts
):
    if combine != "add":
        self_term, normalize = "sum", None
    cuts = sorted({min(cut, seqlen) for cut in cuts})
    bounds = [0, *cuts, seqlen]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if cuts else None
    batch = 1 if cuts else 2
    rows = (len(bounds) - 1 if cuts else batch) if states and not normalize else 0
    inputs = make(
        seqlen,
        batch=batch,
        groups=groups,
        kind=kind,
        scales=scales,
        diagonal=diagonal,
        states=rows,
        positive=bool(normalize),
    )
    for op in (quasiseparable_scan, quasiseparable_chunked):
        assert_matches(
            op,
            quasiseparable_definition,
            inputs,
            op_options={"chunk_size": chunk},
            cu_seqlens=cu_seqlens,
            shift=shift,
            combine=combine,
            self_term=self_term,
            normalize=normalize,
            eps=eps,
            gate_offset=gate_offset,
        )


@pytest.mark.parametrize(
    ("shift", "lengths", "self_term", "gate_offset"),
    [
        (True, None, "sum", 0),
        (False, [3, 1, 20, 9], "mean", 1),
        (False, None, "sum", 1),
        (True, [3, 1, 20, 9], "sum", 1),
    ],
)
def test_matrix(shift, lengths, self_term, gate_offset):
    """The op is the product with M; M's off-diagonal blocks have rank at most d_state."""
    inputs = make(33, batch=1, d_state=3)
    cu_seqlens = None if lengths is None else packed(lengths)
    options = {"shift": shift, "cu_seqlens": cu_seqlens, "self_term": self_term, "gate_offset": gate_offset}
    matrix = quasiseparable_matrix(**inputs, **options)
    y = torch.einsum("bhts,bshp->bthp", matrix, inputs["v"].double())
    assert rmse_ratio(quasiseparable_scan(**inputs, **options), y) < 1e-6
    assert torch.linalg.matrix_rank(matrix[..., 20:, :20]).max() <= 3
    assert torch.linalg.matrix_rank(matrix[..., :20, 20:]).max() <= 3


@pytest.mark.parametrize(("shift", "gate_offset"), itertools.product([True, False], [0, 1]))
def test_matrix_entry_by_entry(shift, gate_offset):
    """The definition's matrix against its entries, each from its own formula."""
    inputs = make(12, batch=1, heads=2, groups=1, diagonal=None)
    x = {name: value[0].double() for name, value in inputs.items()}
    options = {"shift": shift, "gate_offset": gate_offset}
    matrix = quasiseparable_matrix(**inputs, **options)[0]
    offset = int(shift)
    for t, s, head in itertools.product(range(12), range(12), range(2)):
        wanted = 0.0
        if s <= t - offset:
            decay = x["log_decay_forward"][s + 1 : t - offset + 1, head].sum().exp()
            score = x["q_forward"][t - offset, 0] @ x["k_forward"][s, 0] * x["input_scale_forward"][s, head]
            wanted += score * decay
        if s >= t + offset:
            decay = x["log_decay_backward"][t + offset + gate_offset : s + gate_offset, head].sum().exp()
            score = x["q_backward"][t + offset, 0] @ x["k_backward"][s, 0] * x["input_scale_backward"][s, head]
            wanted += score * decay
        assert abs(matrix[head, t, s] - wanted) < 1e-12


def test_rows_sum_to_one_when_normalised():
    """The mixer applied to ones, without eps: one everywhere."""
    inputs = make(100, positive=True)
    inputs["v"] = torch.ones_like(inputs["v"])
    y = quasiseparable_scan(**inputs, normalize="row_sum", eps=0.0)
    assert (y - 1).abs().max() < 1e-5


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


@pytest.mark.parametrize("form", SOME_FORMS)
def test_gradcheck(form):
    inputs = make_for(form, 9, heads=2, d_state=2, headdim=2, groups=1, states=2)
    inputs = {n: x.double().requires_grad_() for n, x in inputs.items()}

    def op(*tensors):
        return quasiseparable_scan(**dict(zip(inputs, tensors, strict=True)), **FORMS[form])

    assert torch.autograd.gradcheck(op, tuple(inputs.values()), fast_mode=True)


@pytest.mark.parametrize("form", SOME_FORMS)
def test_bit_equal_twice(form):
    assert_bit_equal_twice(quasiseparable_scan, make_for(form, 150, states=2), **FORMS[form])


@pytest.mark.parametrize("form", SOME_FORMS)
def test_documents_are_bit_independent(form):
    """Changing one document changes no bit of the others, outputs or gradients, whatever shares its chunk."""
    lengths = [5, 20, 1, 80, 30]
    inputs = make_for(form, sum(lengths), batch=1)
    changed = {n: x.clone() for n, x in inputs.items()}
    for name, x in changed.items():
        noise = torch.randn(x[:, 25:106].shape)
        x[:, 25:106] = -noise.abs() * 20 if name.startswith("log") else noise.abs() * 100

    def gradients(inputs):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        y = quasiseparable_scan(**leaves, cu_seqlens=packed(lengths), **FORMS[form])
        return y.detach(), *torch.autograd.grad(y.square().sum(), list(leaves.values()))

    for before, after in zip(gradients(inputs), gradients(changed), strict=True):
        assert torch.equal(before[:, :25], after[:, :25])
        assert torch.equal(before[:, 106:], after[:, 106:])
        assert not torch.equal(before[:, 25:106], after[:, 25:106])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", ["causal", *SOME_FORMS])
def test_no_nan_reaches_another_document(form, value):
    """Of whichever input, or of the gradient of the output, whatever shares its chunk."""
    lengths, spoilt = [5, 20, 1, 80, 30], slice(25, 106)
    others = torch.tensor([t for t in range(sum(lengths)) if not spoilt.start <= t < spoilt.stop])
    op, inputs = semiseparable_scan, make_causal(sum(lengths), batch=1)
    if form != "causal":
        op, inputs = partial(quasiseparable_scan, **FORMS[form]), make_for(form, sum(lengths), batch=1)

    def results(**changed):
        leaves = {name: changed.get(name, x).clone().requires_grad_() for name, x in inputs.items()}
        y = op(**leaves, cu_seqlens=packed(lengths))
        gradients = torch.autograd.grad(y, list(leaves.values()), changed.get("dy", torch.ones(())).expand_as(y))
        return dict(zip(("y", *leaves), (found.index_select(1, others) for found in (y, *gradients)), strict=True))

    clean = results()
    for name in ("dy", *inputs):
        x = torch.ones(1, sum(lengths), 1, 1) if name == "dy" else inputs[name].clone()
        x[:, spoilt] = -value if name.startswith("log") else value
        errors = {key: rmse_ratio(got, clean[key]) for key, got in results(**{name: x}).items()}
        assert not {key: error for key, error in errors.items() if not error <= FLOAT32}, name


def test_first_and_last_token_see_only_the_other_side():
    """With shift, an end token's output holds nothing of itself but the diagonal term."""
    inputs = make(20, diagonal=None)
    v = inputs["v"].clone().requires_grad_()
    quasiseparable_scan(**{**inputs, "v": v})[:, [0, -1]].sum().backward()
    y = quasiseparable_scan(**{**inputs, "v": v.detach().index_fill(1, torch.tensor([0]), 0.0)})
    same = quasiseparable_scan(**{**inputs, "v": v.detach()})
    assert torch.equal(y[:, 0], same[:, 0])
    assert v.grad[:, 1:-1].abs().sum() > 0


@pytest.mark.parametrize("form", SOME_FORMS)
def test_bfloat16(form):
    """v, q, k in bfloat16, the rest in float32, as a layer has them; outputs and gradients as near as that allows."""
    inputs = make_for(form, 150)
    narrow = {n: x.bfloat16() if n[0] in "vqk" else x for n, x in inputs.items()}
    leaves = {n: x.clone().requires_grad_() for n, x in narrow.items()}
    exact = {n: x.double().requires_grad_() for n, x in narrow.items()}
    y = quasiseparable_scan(**leaves, **FORMS[form])
    wanted = quasiseparable_definition(**exact, **FORMS[form])
    assert y.dtype == torch.bfloat16
    assert rmse_ratio(y, wanted) < 4e-3
    cotangent = torch.randn(wanted.shape)
    y.backward(cotangent.bfloat16())
    wanted.backward(cotangent.bfloat16().double())
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype
        assert rmse_ratio(leaf.grad, exact[name].grad) < 1e-2, name
