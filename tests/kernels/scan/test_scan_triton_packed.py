"""The scans' Triton form on packed documents, and on rows so long that their states are passed on in spans."""

from __future__ import annotations

import pytest
import torch
from compare import packed, rmse_ratio, run
from nightly import each_value_once, nightly
from scans import DTYPES, check, on
from test_quasiseparable import FORMS, make_for
from test_semiseparable import make
from triton_on_cpu import names

from matmix.kernels import quasiseparable_scan, semiseparable_scan
from matmix.kernels.semiseparable.fused import scan

pytestmark = pytest.mark.usefixtures("poisoned")
DOCUMENTS = {"uneven": [1, 5, 64, 3, 130], "empty": [0, 0, 34, 0, 1, 0, 33, 0], "single": [1] * 9, "one": [40]}
MAIN = ("hydra", "unshifted both", "lion")
OFTEN = (*MAIN, "product")
SMALL = {"batch": 1, "heads": 2, "groups": 1}


def cases():
    """Forms, documents and whether there are initial states; most forms meet most documents only at night."""
    for form in FORMS:
        for name, lengths in DOCUMENTS.items():
            for states in (False, True):
                at_its_place = form == "hydra" and states == (name != "one")
                often = at_its_place or (name == "empty" and states and form in OFTEN)
                yield nightly(form, lengths, states, condition=not often)


def gradients_for(lengths, dtype):
    return "none" if dtype == torch.bfloat16 and max(lengths) <= 1 else "all"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "lengths", "states"), cases())
def test_documents(interpreter, form, lengths, states, dtype):
    if states and FORMS[form].get("normalize"):
        states = False  # a normalised scan takes none: per-head decays and diagonals instead
        options = {"kind": "head", "diagonal": "head"}
    else:
        options = {"states": len(lengths) if states else 0}
    # The gradient of one decay for all tokens may be next to nothing: not with two heads.
    shape = SMALL if sum(lengths) < 100 or "kind" in options else SMALL | {"heads": 1}
    inputs = make_for(form, sum(lengths), **shape, **options)
    given = {"cu_seqlens": packed(lengths), "gradients": gradients_for(lengths, dtype)}
    check(interpreter, quasiseparable_scan, inputs, dtype, **given, **FORMS[form])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "states"), each_value_once(list(DOCUMENTS.values()), [True, False]))
def test_documents_of_the_causal_scan(interpreter, lengths, states, dtype):
    """With the final state of each document, which of an empty one is its initial state."""
    inputs = make(sum(lengths), **SMALL, states=len(lengths) if states else 0)
    given = {"cu_seqlens": packed(lengths), "gradients": gradients_for(lengths, dtype)}
    check(interpreter, semiseparable_scan, inputs, dtype, return_final_state=True, **given)


def test_empty_documents_pass_states_through(interpreter):
    lengths = [0, 20, 0]
    inputs = make(20, **SMALL, states=3)
    call = on(interpreter, semiseparable_scan)
    _, final = call(**inputs, return_final_state=True, cu_seqlens=packed(lengths))
    assert torch.equal(final[[0, 2]], inputs["initial_state"][[0, 2]])
    assert not torch.equal(final[1], inputs["initial_state"][1])


def test_boundaries_in_64_bits(interpreter):
    inputs = make(50, **SMALL)
    call, bounds = on(interpreter, semiseparable_scan), packed([20, 0, 30])
    narrow, wide = (call(**inputs, cu_seqlens=x) for x in (bounds, bounds.long()))
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("form", [nightly("causal"), *(nightly(form, condition=form != "hydra") for form in FORMS)])
def test_documents_are_bit_independent(interpreter, form, monkeypatch):
    """Changing one document, also to NaN, changes no bit of the others' outputs and gradients."""
    # On a GPU nobody looks; here a NaN among the decays would be refused.
    monkeypatch.setattr("matmix.kernels.semiseparable.form.check_at_most", lambda *_, **__: None)
    lengths, changed = [5, 20, 1, 40, 14], slice(25, 66)
    shape = {"batch": 1, "heads": 1, "groups": 1, "states": 5}
    others = [t for t in range(sum(lengths)) if not changed.start <= t < changed.stop]
    if form == "causal":
        op, inputs, options = semiseparable_scan, make(sum(lengths), **shape), {"return_final_state": True}
    else:
        op, inputs, options = quasiseparable_scan, make_for(form, sum(lengths), **shape), FORMS[form]
    states = {name for name in inputs if name.startswith("initial")}

    def results(value):
        given = {name: x.clone() for name, x in inputs.items()}
        for name, x in given.items():
            if name in states:
                x[2:4] = value
            else:
                x[:, changed] = -abs(value) if name.startswith("log") else value
        return run(on(interpreter, op), given, torch.float32,
                   cu_seqlens=packed(lengths), **options)  # fmt: skip

    before = results(0.3)
    for value in (20.0, torch.nan):
        after = results(value)
        for name, x in before.items():
            by_document = name == "output 1" or name.removeprefix("d ") in states
            dim, kept = (0, [0, 1, 4]) if by_document else (1, others)
            index = torch.tensor(kept)
            assert torch.equal(x.index_select(dim, index), after[name].index_select(dim, index)), name
        assert not torch.equal(before["output 0"][:, changed], after["output 0"][:, changed])


SPANS = [9, 0, 420, 1, 165, 0]
LONG = {"d_state": 3, "headdim": 4, "batch": 1, "heads": 1, "groups": 1}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "lengths"),
    [(form, lengths) for form in ("causal", *FORMS) for lengths in (None, SPANS)],
)
def test_spans(interpreter, launched, form, lengths, dtype):
    """From 32 chunks on where there are few heads; the last span is not full. Both directions, initial and final
    states."""
    seqlen, documents = (520, 1) if lengths is None else (sum(lengths), len(lengths))
    given = {"cu_seqlens": None if lengths is None else packed(lengths), "chunk_size": 16}
    if form == "causal":
        inputs = make(seqlen, **LONG, states=documents, kind="mixed")
        check(interpreter, semiseparable_scan, inputs, dtype, return_final_state=True, **given)
    else:
        inputs = make_for(form, seqlen, **LONG, states=documents, kind="growing")
        check(interpreter, quasiseparable_scan, inputs, dtype, **given, **FORMS[form])
    assert names(launched).count("combine_spans") >= 3


@pytest.mark.parametrize("form", ["unshifted both", "lion"])
def test_forward_spans(interpreter, launched, form):
    """Spans of concatenated directions and of row sums; their gradients run nightly."""
    inputs = make_for(form, 520, **LONG, kind="mixed")
    options = {**FORMS[form], "chunk_size": 16}
    got = on(interpreter, quasiseparable_scan)(**inputs, **options)
    wanted = quasiseparable_scan(**inputs, **options, backend="torch")
    assert rmse_ratio(got, wanted) < 1e-5
    assert names(launched).count("combine_spans") == (2 if form == "lion" else 1)


@pytest.mark.slow
def test_spans_of_several_rows(interpreter, launched):
    inputs = make(530, batch=2, heads=1, groups=1, d_state=3, headdim=4, states=2, kind="token")
    check(interpreter, semiseparable_scan, inputs, return_final_state=True, chunk_size=16)
    assert names(launched).count("combine_spans") == 3


@pytest.mark.slow
def test_many_programs_are_not_split(interpreter, launched, monkeypatch):
    """Where documents and heads alone keep the GPU busy, states take one launch; several heads share a program."""
    monkeypatch.setattr(scan, "PROGRAMS", 4)
    inputs = make(520, batch=1, heads=2, groups=1, d_state=3, headdim=4, states=1)
    check(interpreter, semiseparable_scan, inputs, return_final_state=True, chunk_size=16)
    assert "combine_spans" not in names(launched)
    assert names(launched).count("state_pass") == 3
