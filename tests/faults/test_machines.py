"""Machines that misbehave without breaking: wrong clock, slow reader, little memory, second job, NaN on one rank."""

import pytest
from fault_harness import assert_same

from matmix.train.process.exits import EXIT_FAILED, EXIT_OK, EXIT_USER


@pytest.mark.slow
def test_a_clock_is_an_hour_off(make_run, two_ranks):
    run = make_run(ranks=2)
    late = run.start(faults=[{"kind": "clock_offset", "seconds": -3600, "rank": 1}, _pause(13)])
    late.wait_for_mark("pause")
    late.kill()
    run.finish(faults=[{"kind": "clock_offset", "seconds": 3600, "rank": 1}])
    assert_same(run, two_ranks)


@pytest.mark.slow
def test_a_slow_reader(make_run, one_rank):
    """Reading takes longer than the watchdog waits, but no batch does: an alarm would be false."""
    run = make_run("--faults.hang-minutes", "0.2")
    run.finish(faults=[{"kind": "slow_reader", "seconds": 0.25}])
    assert_same(run, one_rank)
    waits = [record["data_wait"] for record in run.records()]
    assert min(waits[1:]) > 0.5
    assert sorted(one["data_wait"] for one in one_rank.records())[15] < 0.5


@pytest.mark.slow
def test_memory_runs_out(make_run):
    large = ("--steps", "3", "--global-batch-size", "256")
    run = make_run(*large, "--micro-batch-size", "256")
    attempt = run.start(faults=[{"kind": "little_memory", "step": 2, "more": 1 << 20}])
    assert attempt.wait() == [EXIT_FAILED]
    error = attempt.text().strip().splitlines()[-1]
    assert error.startswith("matmix: error: out of memory on the CPU (tried to allocate ")
    assert "at micro_batch_size 256 and data.seqlen 32" in error
    assert "set --micro-batch-size 128" in error
    assert "set --engine.activation-checkpointing full" in error
    assert "Traceback" not in attempt.text()
    assert run.finish("--micro-batch-size", "128").poll() == [EXIT_OK]
    assert [step for step, *_ in run.curve()] == [1, 2, 3]


@pytest.mark.slow
def test_two_jobs_on_one_run_directory(make_run, one_rank):
    run = make_run()
    first = run.start(faults=[_pause(13)])
    first.wait_for_mark("pause")
    second = run.start()
    assert second.wait() == [EXIT_USER]
    _, error = second.text().strip().splitlines()  # after what would be trained
    assert error.startswith("matmix: error: ")
    assert str(run.path) in error
    first.set_mark("go")
    assert first.wait() == [EXIT_OK]
    assert_same(run, one_rank)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_nan_gradients_on_one_rank(make_run, two_ranks, engine):
    """All ranks skip the step. (A skipped step changes the weights that follow, so there is another curve.)"""
    fault, options = {"kind": "nan_gradients", "step": 8, "rank": 1}, ("--engine.name", engine)
    run = make_run(*options, ranks=2)
    attempt = run.finish(faults=[fault])
    assert "step 8: " in attempt.text(0)
    assert "step skipped, weights unchanged" in attempt.text(0)
    before, expected = ([loss for _, loss, *_ in each.curve()[:7]] for each in (run, two_ranks))
    assert before == pytest.approx(expected, rel=1e-4)
    assert [record["skipped"] for record in run.records()] == [0] * 7 + [1] * 23
    again = make_run(*options, ranks=2)
    killed = again.start(faults=[fault, _pause(13)])
    killed.wait_for_mark("pause")
    killed.kill()
    again.finish(faults=[fault])
    assert_same(again, run)


def _pause(step: int) -> dict:
    return {"kind": "pause", "step": step, "markers": True}
