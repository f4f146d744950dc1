"""A rank that stands still: every rank leaves its stacks and ends, and the next start goes on."""

import pytest
from fault_harness import assert_same
from nightly import nightly

from matmix.train.callbacks.watchdog import Watchdog
from matmix.train.process.exits import EXIT_HUNG
from matmix.train.run.outcome import read_outcomes


def _hang_before(step: int, how: str) -> list[dict]:
    """The faults of a run whose rank 1 stands still before `step` (what is armed last acts first)."""
    return [
        {"kind": "hang", "step": step, "rank": 1, "how": how, "markers": True},
        {"kind": "impatient", "step": step, "seconds": 3.0},
    ]


def _stacks(run) -> list[str]:
    return [path.read_text() for path in sorted((run.path / "logs" / "attempt-0").glob("rank-*.stacks.txt"))]


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, nightly(True)])
def test_one_rank_stands_still(make_run, request, goes_on):
    run = make_run("--faults.hang-minutes", "10", ranks=2)
    attempt = run.start(faults=_hang_before(13, "sleep"))
    assert attempt.wait() == [EXIT_HUNG, EXIT_HUNG]
    waiting, hung = _stacks(run)
    assert "in all_reduce_sum" in waiting
    assert "in sleep_for_ever" in hung
    outcomes = read_outcomes(run.path, "attempt-0")
    assert list(outcomes) == [0, 1]
    for rank, outcome in outcomes.items():
        assert (outcome.code, outcome.step, outcome.saved_step) == (EXIT_HUNG, 12, 10)
        assert outcome.reason.startswith("rank 1 made no progress for ")  # on rank 0, which waits, too
        assert "; its main thread is in sleep_for_ever (" in outcome.reason
        assert outcome.reason.endswith("; rank 0 waits for it")
        assert f"matmix: error: {outcome.reason}\n" in attempt.text(rank)
    if goes_on:
        run.finish()
        assert_same(run, request.getfixturevalue("two_ranks"))
        assert not list((run.path / "logs" / "attempt-1").glob("*.stacks.txt"))


@pytest.mark.slow
def test_one_rank_hangs_in_c_and_keeps_the_interpreter_to_itself(make_run):
    run = make_run("--faults.hang-minutes", "10", ranks=2)
    attempt = run.start(faults=_hang_before(3, "c"))
    # No Python of rank 1 can run: a timer outside the interpreter ends it, with the only code that it knows.
    assert attempt.wait() == [EXIT_HUNG, 1]
    waiting, hung = _stacks(run)
    assert "in all_reduce_sum" in waiting
    assert "in stand_still" in hung
    assert "matmix: error: rank 1 stopped and does not answer any more; rank 0 waits for it" in attempt.text(0)


def test_minutes_are_minutes():
    assert Watchdog(30).limit == 1800
