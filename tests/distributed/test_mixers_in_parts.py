"""Every registered mixer that claims to mix parts of rows: outputs and all gradients are those of whole rows."""

from __future__ import annotations

import functools
import itertools

import mixer_parts_scenario
import pytest
import torch
from harness import run_distributed
from mixer_parts_scenario import CASES, DOCUMENTS, Results
from nightly import nightly
from torch import Tensor

from matmix.model.mixers import MIXERS

ABLE = [name for name, case in CASES.items() if not case.kind.why_no_context(case.config, case.causal)]
"""A mixer is covered by not refusing a context."""
SCANS = {
    *("bidirectional_add", "bidirectional_add_diagonal", "bidirectional_add_shift", "bidirectional_concat"),
    *("bidirectional_mult", "hydra", "linear_attention", "lion_d", "lion_lit", "lion_s", "low_rank_dd"),
    *("quasiseparable_dd", "retnet", "semiseparable", "sma_causal", "sma_decay", "sma_semiseparable"),
    *("gated_delta", "matrix_memory", "mru", "rwkv7", "s6"),
}


def test_all_scans_mix_parts_and_mixers_of_a_fixed_length_do_not():
    able = {CASES[name].mixer for name in ABLE}
    assert able >= SCANS
    assert not {name for name in able if MIXERS[name].fixed_length}


@functools.cache
def whole(name: str, documents: str, dtype: torch.dtype) -> Results:
    return mixer_parts_scenario.run(name, documents, dtype, None)


def far(got: Results, wanted: Results) -> float:
    """The largest difference, of each tensor relative to its largest value."""
    return max(((got[key] - x).abs().max() / x.abs().max()).item() for key, x in wanted.items())


def check(cases: list[tuple[str, str]], ranks: int, dtype: torch.dtype) -> None:
    """In float32 results may be three times as far from those in float64 as whole rows' are."""
    by_rank = run_distributed(mixer_parts_scenario.run_parts, ranks, arguments=(cases, dtype))
    wrong = {}
    for case, *parts in zip(cases, *by_rank, strict=True):
        exact = whole(*case, torch.float64)
        got = {key: together(key, [part[key] for part in parts]) for key in exact}
        # Angles that are powers of large numbers multiply roundings.
        exactly = 1e-11 if case[0] == "vandermonde_dd-power" else 1e-12
        bound = exactly if dtype == torch.float64 else max(1e-5, 3 * far(whole(*case, dtype), exact))
        if not (size := far(got, exact)) <= bound:
            wrong[case] = size, bound
    assert not wrong, f"on {ranks} ranks: {wrong}"


def together(key: str, parts: list[Tensor]) -> Tensor:
    """Of tokens each rank has some; to the gradient of a parameter each rank contributes."""
    return torch.cat(parts, 1) if key in ("x", "y") else sum(parts)


def some(shift: int) -> list[tuple[str, str]]:
    """Each mixer with two kinds of documents, of which one lies over three ranks."""
    kinds = [kind for kind in DOCUMENTS if kind != "over three ranks"]
    return [
        (name, kind) for at, name in enumerate(ABLE) for kind in ("over three ranks", kinds[(at + shift) % len(kinds)])
    ]


@pytest.mark.parametrize("ranks", [nightly(2), nightly(3), nightly(4)])
def test_parts_give_what_whole_rows_give(ranks):
    check(some(ranks), ranks, torch.float64)


@pytest.mark.slow
def test_parts_of_four_ranks():
    """The kinds of documents that the test in float32 leaves out."""
    check([case for case in some(4) if case[1] != "over three ranks"], 4, torch.float64)


@pytest.mark.slow
def test_parts_in_float32():
    check([(name, "over three ranks") for name in ABLE], 3, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["lion_s-published-gates"], ["hydra", "hydra-recomputed", "retnet-causal"]])
def test_compiled_mixers_are_one_graph(names):
    """Recomputed layers repeat what ranks send."""
    assert run_distributed(mixer_parts_scenario.compiled, 2, arguments=(names,)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changed"),
    [(2, "full"), (3, ""), (4, "full"), (4, "selective"), (2, "compiled")],
)
def test_rows_in_parts_go_on_from_states(ranks, changed):
    """Rows that begin and end inside of parts; documents over several rows. All ranks have the states of all rows. NaN
    ends with its document."""
    whole = mixer_parts_scenario.carried(changed, parts=False)
    parts = run_distributed(mixer_parts_scenario.carried, ranks, arguments=(changed,))
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10, equal_nan=True)
    assert whole["y"][-1].isnan().any(1).nonzero().flatten().tolist() == list(range(13))
    close([torch.cat(y) for y in zip(*(part["y"] for part in parts), strict=True)], whole["y"])
    close([sum(one) for one in zip(*(part["gradients"] for part in parts), strict=True)], whole["gradients"])
    for part in parts:
        close(part["states"], whole["states"])


@pytest.mark.slow
def test_scans_send_as_much_whatever_the_length():
    """A Hydra layer of 4 heads, states 4 x 8, one group, 48 channels before its convolution of 7 taps."""
    names = ["hydra", "semiseparable", "bidirectional_mult", "lion_s", "linear_attention", "retnet"]
    for sent in run_distributed(mixer_parts_scenario.bytes_sent, 2, arguments=(names, [4096, 65536])):
        for name in names:
            assert sent[name, 4096] == sent[name, 65536] != []
        # Of each direction the states, total decays and the q at the edge; in the backward pass again, and cotangents.
        states = [("all_gather_into_tensor", 4 * (4 * 4 * 8 + 4 + 4))] * 2
        rows = ("batch_isend_irecv", 4 * 3 * 48)
        assert sent["hydra", 4096] == [rows, *states, *states, *states, rows, rows]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ranks", [nightly(ranks) for ranks in (2, 3, 4)])
def test_all_mixers_with_all_kinds_of_documents(ranks, dtype):
    check(list(itertools.product(ABLE, DOCUMENTS)), ranks, dtype)
