"""Scans over rows that several ranks hold parts of: the numbers are those of whole rows on one rank."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from harness import run_distributed
from nightly import nightly
from parts_scenario import Case, check_parts, run_parts
from scan_cases import DOCUMENTS, KINDS, SEQLEN, all_cases, causal, draw, few_cases, packed, two_sided, typed

from matmix.kernels.lion.definition import lion_mixer_definition


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_are_what_the_definition_makes_of_whole_rows(ranks):
    check_parts(few_cases(), ranks, 1e-12)


def test_float32():
    check_parts({label: typed(case, torch.float32) for label, case in few_cases().items()}, 3, 1e-5)


def test_lion_mixer():
    """Gates of either direction may be those of a neighbour's token."""
    cases = {}
    for offset, (documents, sums) in itertools.product((0, 1), (("rows", True), ("over three ranks", False))):
        bounds = packed(DOCUMENTS[documents])
        batch = 2 if bounds is None else 1
        inputs = {"qkv": draw(batch, SEQLEN, 3 * 2 * 4), "gates": draw(batch, SEQLEN, 2)}
        options = {"nheads": 2, "gate_offset": 1, "forward_gate_offset": offset, "return_row_sums": sums}
        wanted = functools.partial(lion_mixer_definition, **options)
        cases[f"{documents}, {offset}"] = Case("lion_mixer", inputs, bounds, options, wanted)
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
