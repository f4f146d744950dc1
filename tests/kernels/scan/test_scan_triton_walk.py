"""The Triton form where one program makes all tiles of a document for a head, with the first direction's state in
registers. It does so where there are documents and heads enough for a GPU."""

from __future__ import annotations

import pytest
import torch
from compare import packed
from nightly import each_value_once
from scans import DTYPES, check
from test_quasiseparable import FORMS, make_for
from test_semiseparable import make

from matmix.kernels import quasiseparable_scan, semiseparable_scan
from matmix.kernels.semiseparable.fused import launch as fused
from matmix.kernels.semiseparable.fused import scan
from matmix.kernels.semiseparable.fused.scan import usual

pytestmark = pytest.mark.usefixtures("poisoned")
LENGTHS = {"one row": None, "documents": [1, 5, 0, 64, 3, 37, 0]}


@pytest.fixture(autouse=True)
def walking(monkeypatch):
    monkeypatch.setattr(scan, "PROGRAMS", 1)


def walks(launched) -> set[bool]:
    return {found.constants["WALK"] for found in launched if found.kernel.__name__ == "mix"}


def inputs_for(form, seqlen, **options):
    shape = {"batch": 1, "heads": 2, "groups": 1} | options
    return make(seqlen, **shape) if form == "causal" else make_for(form, seqlen, **shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "lengths", "chunk"),
    each_value_once(["causal", "hydra", "unshifted both", "lion"], list(LENGTHS), [32, 64]),
)
def test_every_form(interpreter, launched, form, lengths, chunk, dtype):
    """Rows that fill their last chunk and not, with one tile of a chunk or two."""
    config = usual(dtype.itemsize)._replace(walk=True, tile=32, forward_chunk=chunk, backward_chunk=chunk)
    op = semiseparable_scan if form == "causal" else quasiseparable_scan
    lengths = LENGTHS[lengths]
    given = FORMS.get(form, {}) | ({} if lengths is None else {"cu_seqlens": packed(lengths)})
    with fused.force_configuration(config):
        for seqlen in (sum(lengths),) if lengths else (75, 128):
            check(interpreter, op, inputs_for(form, seqlen), dtype, **given)
    if interpreter == "cpu":
        assert walks(launched) == {True}


def test_a_causal_scan_stores_no_states(interpreter, launched):
    inputs = {name: x.to(interpreter).bfloat16() for name, x in inputs_for("causal", 300).items()}
    semiseparable_scan(**inputs, backend="triton")
    if interpreter == "cpu":
        assert [found.kernel.__name__ for found in launched] == ["decay_sums", "mix"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_that_are_given_or_wanted_are_passed_on(interpreter, launched, dtype):
    inputs = make(150, batch=1, heads=2, groups=1, states=1)
    check(interpreter, semiseparable_scan, inputs, dtype, return_final_state=True)
    if interpreter == "cpu":
        assert walks(launched) == {False}


def test_few_documents_are_not_walked_along(interpreter, launched, monkeypatch):
    monkeypatch.setattr(scan, "PROGRAMS", 3)
    check(interpreter, quasiseparable_scan, inputs_for("hydra", 300), torch.bfloat16, **FORMS["hydra"])
    if interpreter == "cpu":
        assert walks(launched) == {False}
