"""Scans over rows that several ranks hold parts of: the numbers are those of whole rows on one rank."""

from __future__ import annotations

import pytest
import torch
from harness import run_distributed
from nightly import nightly
from parts_scenario import check_parts, run_parts
from scan_cases import KINDS, all_cases, causal, few_cases, lion_layer, two_sided, typed


@pytest.mark.parametrize("ranks", [2, 3, nightly(4)])
def test_parts_are_what_the_definition_makes_of_whole_rows(ranks):
    check_parts(few_cases(), ranks, 1e-12)


@pytest.mark.slow
def test_float32():
    check_parts({label: typed(case, torch.float32) for label, case in few_cases().items()}, 3, 1e-5)


def test_lion_mixer():
    offsets, documents = (0, 1), ("rows", "over three ranks")
    cases = {f"{kind}, {offset}": lion_layer(kind, offset) for kind in documents for offset in offsets}
    check_parts(cases, 3, 1e-12)


@pytest.mark.parametrize("kind", [nightly(kind) for kind in KINDS])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_form_of_any_documents(kind, ranks):
    # A closed gate is taken as e^-1000, and sums of such logarithms are exact to 1e-12.
    check_parts(all_cases(kind), ranks, 1e-11 if kind == "gates that close" else 1e-12)


def test_nan_does_not_cross_a_cut_into_another_document():
    calls = []
    for case in (causal("at thirds"), two_sided("hydra", "at thirds"), two_sided("lion", "at thirds")):
        poisoned = {name: x.clone() for name, x in case.inputs.items()}
        for x in poisoned.values():
            x[:, 20:40] = torch.nan
        dy = torch.ones_like(poisoned["v"])
        calls += [(case.name, inputs, [dy], case.cu_seqlens, case.options) for inputs in (case.inputs, poisoned)]
    for rank, results in enumerate(run_distributed(run_parts, 3, arguments=(calls,))):
        for ((y,), gradients), ((other,), others) in zip(results[::2], results[1::2], strict=True):
            assert other.isnan().all() if rank == 1 else torch.equal(y, other)
            for name, gradient in gradients.items():
                assert rank == 1 or torch.equal(gradient, others[name]), name
