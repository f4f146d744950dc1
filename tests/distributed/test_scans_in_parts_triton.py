"""The Triton kernels of scans over rows that several ranks hold parts of, in the interpreter."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from harness import run_distributed
from nightly import nightly
from parts_scenario import Case, check_parts, run_interpreted_parts
from scan_cases import DOCUMENTS, FORMS, KINDS, causal, lion_layer, long_rows, packed, scan_layer, two_sided, typed

from matmix.kernels.context import Context
from matmix.kernels.semiseparable.form import ScanCall, ScanForm, ScanSide
from matmix.kernels.semiseparable.fused import launch as fused
from matmix.kernels.short_conv.definition import short_conv_definition

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def once() -> dict[str, Case]:
    """Each form, each kind of documents and each kind of decays once."""
    cases, documents = {"causal": causal("over three ranks", states=True)}, list(DOCUMENTS)
    for at, form in enumerate(FORMS):
        cases[form] = two_sided(form, documents[at % len(documents)], KINDS[at % 4], at % 2 == 0)
    return cases


def layers() -> dict[str, Case]:
    found = [lion_layer("rows", 1), lion_layer("rows", gates="head"), lion_layer("over three ranks")]
    found += [scan_layer("rows"), scan_layer("single tokens", states=True), scan_layer("at cuts", directions=1)]
    return {f"layer {number}": layer for number, layer in enumerate(found)}


def convolution(width: int, causal: bool) -> Case:
    inputs = {"x": torch.randn(1, 60, 5), "weight": torch.randn(5, width), "bias": torch.randn(5)}
    options = {"causal": causal, "activation": "silu"}
    wanted = functools.partial(short_conv_definition, **options)
    return Case("short_conv", inputs, packed([27, 1, 1, 1, 4, 26]), options, wanted)


def few() -> dict[str, Case]:
    """The forms of models."""
    lion, hydra = lion_layer("single tokens"), scan_layer("over three ranks")
    summed = two_sided("normalised", "at cuts", states=True)
    return {"lion": lion, "hydra": hydra, "summed": summed, "causal": causal("rows")} | {
        f"convolution of {width}": convolution(width, causal) for width, causal in ((4, True), (7, False))
    }


def spans() -> dict[str, Case]:
    """Rows that are long enough for states to be passed span by span."""
    return {"long": long_rows()}


def every(kind: str) -> dict[str, Case]:
    cases = {}
    for documents, states in itertools.product(DOCUMENTS, (False, True)):
        cases[f"causal, {documents}, {states}"] = causal(documents, kind, states)
        for form in FORMS:
            cases[f"{form}, {documents}, {states}"] = two_sided(form, documents, kind, states)
    return cases


def check(cases: dict[str, Case], ranks: int, dtype: torch.dtype) -> None:
    check_parts({label: typed(case, dtype) for label, case in cases.items()}, ranks, TOLERANCE[dtype], interpreted=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "ranks", "dtype"),
    [
        (few, 2, torch.bfloat16),
        (once, 3, torch.float32),
        (layers, 3, torch.float32),
        (few, 2, torch.float32),
        *((spans, 2, dtype) for dtype in TOLERANCE),
        (once, 2, torch.bfloat16),
    ],
)
def test_parts_are_what_the_definition_makes_of_whole_rows(cases, ranks, dtype):
    check(cases(), ranks, dtype)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "ranks"), [nightly(kind, 2 + at % 2) for at, kind in enumerate(KINDS)])
def test_any_form_of_any_documents(kind, ranks):
    check(every(kind), ranks, torch.float32)


@pytest.mark.slow
def test_nan_does_not_cross_a_cut_into_another_document():
    calls = []
    for case in (two_sided("hydra", "at thirds"), two_sided("lion", "at thirds")):
        clean = typed(case, torch.float32).inputs
        poisoned = {name: x.clone() for name, x in clean.items()}
        for x in poisoned.values():
            x[:, 20:40] = torch.nan
        dy = torch.ones_like(clean["v"])
        calls += [(case.name, inputs, [dy], case.cu_seqlens, case.options) for inputs in (clean, poisoned)]
    parts = run_distributed(run_interpreted_parts, 3, arguments=(calls,), interpreted=True)
    for rank, results in enumerate(parts):
        for ((y,), gradients), ((other,), others) in zip(results[::2], results[1::2], strict=True):
            assert other.isnan().all() if rank == 1 else torch.equal(y, other)
            assert rank == 1 or all(torch.equal(x, others[name]) for name, x in gradients.items())


def test_states_are_stored_while_the_ranks_gather(monkeypatch):
    """In the forward pass of long rows; in the backward pass also while the states' cotangents are summed up."""
    order = []

    def gather(*_, **__):
        order.append("gather")
        return SimpleNamespace(wait=lambda: order.append("wait"))

    class Noted(list):
        def append(self, launch):
            order.append(launch.kernel.__name__)

    monkeypatch.setattr("torch.distributed.all_gather_into_tensor", gather)
    monkeypatch.setattr(Context, "named", lambda name: Context(name, 0, 2))
    monkeypatch.setattr(Context, "group", None)
    monkeypatch.setattr("matmix.kernels.launching._recorder", Noted())
    monkeypatch.setattr("matmix.kernels.launching._running", False)
    v, q = torch.empty(1, 16384, 4, 64, device="meta"), torch.empty(1, 16384, 1, 64, device="meta")
    decay = torch.empty(1, 16384, 4, device="meta")
    sides = tuple(ScanSide(q, q, decay, None, None, reverse) for reverse in (False, True))
    call = ScanCall(v, sides, None, ScanForm(shift=True), context="two ranks")
    passed = ["state_pass", "combine_spans", "gather", "gather", "state_pass", "wait", "wait"]
    fused.forward(call, False)
    assert order == ["decay_sums", *passed, "add_entering", "mix"]
    order.clear()
    fused.backward(v, None, None, call)
    again = ["state_pass", "combine_spans", "wait", "wait", "add_entering", *passed[2:]]
    assert order[: order.index("pair_gradients")] == ["decay_sums", *passed[:5], *again, "add_entering"]
