"""A rank that stands still: every rank leaves its stacks and ends, and the next start goes on."""

from harness import assert_same

from matmix.train.exits import EXIT_HUNG
from matmix.train.outcome import read_outcomes

_LIMIT = ("--faults.hang-minutes", "0.06")


def _stacks(run) -> list[str]:
    return [path.read_text() for path in sorted((run.path / "logs" / "attempt-0").glob("rank-*.stacks.txt"))]


def test_one_rank_stands_still(make_run, two_ranks):
    run = make_run(*_LIMIT, ranks=2)
    attempt = run.start(faults=[{"kind": "hang", "step": 13, "rank": 1, "markers": True}])
    assert attempt.wait() == [EXIT_HUNG, EXIT_HUNG]
    waiting, hung = _stacks(run)
    assert "in all_reduce_sum" in waiting
    assert "in sleep_for_ever" in hung
    for rank, outcome in read_outcomes(run.path, "attempt-0").items():
        assert (outcome.code, outcome.step, outcome.saved_step) == (EXIT_HUNG, 12, 10)
        assert outcome.reason.startswith(f"rank {rank} made no progress for 4 s")
        assert "the last sign of life was" in outcome.reason
        assert f"matmix: error: {outcome.reason}\n" in attempt.text(rank)
    assert len(read_outcomes(run.path, "attempt-0")) == 2
    run.finish()
    assert_same(run, two_ranks)
    assert not list((run.path / "logs" / "attempt-1").glob("*.stacks.txt"))


def test_one_rank_hangs_in_c_and_keeps_the_interpreter_to_itself(make_run):
    run = make_run(*_LIMIT, ranks=2)
    attempt = run.start(faults=[{"kind": "hang", "step": 3, "rank": 1, "how": "c", "markers": True}])
    # No Python of rank 1 can run: a timer outside the interpreter ends it, with the only code that it knows.
    assert attempt.wait() == [EXIT_HUNG, 1]
    waiting, hung = _stacks(run)
    assert "in all_reduce_sum" in waiting
    assert "in stand_still" in hung


def test_a_run_that_goes_on_leaves_no_stacks(make_run, one_rank):
    """Evaluations and saves are signs of life, too: together they take longer here than a rank may be silent."""
    run = make_run("--faults.hang-minutes", "0.02", ranks=1)
    run.finish(faults=[{"kind": "slow_reader", "seconds": 0.05}])
    assert_same(run, one_rank)
    assert not list((run.path / "logs").rglob("*.stacks.txt"))
