"""Short convolutions over rows that several ranks hold parts of: the numbers are those of whole rows on one rank."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from harness import run_distributed
from nightly import nightly
from parts_scenario import Case, check_parts, run_parts
from scan_cases import packed

from matmix.kernels import short_conv
from matmix.kernels.context import Context
from matmix.kernels.short_conv.definition import short_conv_definition

SEQLEN = 36
"""Cut by 2, 3 and 4 ranks into parts of 9 tokens and more."""
DOCUMENTS = {
    "rows": None,
    "at cuts": [9, 3, 6, 6, 3, 9],
    "over three ranks": [7, 24, 5],
    "single tokens": [8, 1, 2, 1, 4, 1, 1, 1, 6, 1, 1, 9],
    "empty ones": [0, 18, 0, 0, 1, 17, 0],
}
FORMS = {"causal 4": (4, True), "causal 9": (9, True), "centred 3": (3, False), "centred 9": (9, False)}


def conv_case(documents: str, form: str, activation: str | None, bias: bool, dtype=torch.float64) -> Case:
    bounds, (width, causal) = packed(DOCUMENTS[documents]), FORMS[form]
    inputs = {"x": torch.randn(2 if bounds is None else 1, SEQLEN, 6, dtype=dtype)}
    inputs["weight"] = torch.randn(6, width, dtype=dtype)
    if bias:
        inputs["bias"] = torch.randn(6, dtype=dtype)
    options = {"causal": causal, "activation": activation}
    wanted = functools.partial(short_conv_definition, **options)
    return Case("short_conv", inputs, bounds, options, wanted)


def all_cases(dtype=torch.float64) -> dict[str, Case]:
    return {
        f"{documents}, {form}, {activation}": conv_case(documents, form, activation, activation is None, dtype)
        for documents, form, activation in itertools.product(DOCUMENTS, FORMS, (None, "silu"))
    }


@pytest.mark.parametrize("ranks", [2, 3, nightly(4)])
def test_parts_are_what_the_definition_makes_of_whole_rows(ranks):
    check_parts(all_cases(), ranks, 1e-14)


@pytest.mark.slow
def test_float32():
    check_parts(all_cases(torch.float32), 3, 1e-6)


def test_nan_does_not_cross_a_cut_into_another_document():
    calls = []
    for form, poison in itertools.product(("causal 9", "centred 9"), (False, True)):
        case = conv_case("single tokens", form, "silu", False)
        bounds = packed([10, 1, 1, 1, 13, 8, 1, 1])
        case.inputs["x"] = torch.linspace(-1, 1, 36 * 6, dtype=torch.float64).view(1, 36, 6)
        case.inputs["weight"] = torch.linspace(-1, 1, 54, dtype=torch.float64).view(6, 9)
        if poison:
            for t in POISONED:
                case.inputs["x"][:, t] = torch.nan
        calls.append((case.name, case.inputs, [torch.ones(1, 36, 6, dtype=torch.float64)], bounds, case.options))
    parts = run_distributed(run_parts, 3, arguments=(calls,))
    for at in (0, 2):
        for read in (lambda result: result[0][0], lambda result: result[1]["x"]):
            clean, poisoned = (torch.cat([read(rank[call]) for rank in parts], 1) for call in (at, at + 1))
            other = [t for t in range(36) if t not in POISONED]
            assert poisoned[:, POISONED].isnan().all()
            assert torch.equal(clean[:, other], poisoned[:, other])


POISONED = [*range(10), 11, *range(26, 34), 35]
"""Documents whose ends are near the cuts at 12 and 24, in full."""


def test_refusals():
    context, weight = Context("none", 0, 2), torch.randn(6, 9)
    with pytest.raises(ValueError, match="9 taps need at least 8; cut rows into fewer parts"):
        short_conv(torch.randn(1, 7, 6), weight, context=context)
    with pytest.raises(ValueError, match="return_final_state and context are both given"):
        short_conv(torch.randn(1, 9, 6), weight, causal=True, return_final_state=True, context=context)
