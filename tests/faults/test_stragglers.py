"""A slow rank or reader is named by a run of real processes; the ranks that wait for it are not."""

import pytest

# At such sizes the others' own time is a few milliseconds; what is injected is far above what a busy machine does.
_OPTIONS = ("--logging.every", "3", "--steps", "24", "--evaluation.every", "0", "--checkpoint.every", "0")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_rank_that_computes_slowly_is_named(make_run, engine):
    run = make_run(*_OPTIONS, "--engine.name", engine, ranks=2)
    attempt = run.finish(faults=[{"kind": "slow_steps", "first": 4, "last": 24, "seconds": 0.25, "rank": 1}])
    text = attempt.text()
    assert text.count("the other ranks wait for rank 1, which needs ") == 1, text
    assert "wait for rank 0" not in text
    last = run.records()[-1]
    assert last["ranks/slowest"] == 1
    assert last["ranks/own_max"] > 0.25
    # A busy machine makes collectives slow on both; the rank that waits has the injected time on top.
    assert last["ranks/collectives_max"] > last["ranks/collectives_min"] + 0.1


@pytest.mark.slow
def test_a_slow_reader_of_a_rank_above_0_is_named(make_run):
    run = make_run(*_OPTIONS, "--data.workers", "0", ranks=2)
    attempt = run.finish(faults=[{"kind": "slow_reader", "seconds": 0.25, "rank": 1}])
    text = attempt.text()
    assert text.count("the other ranks wait for rank 1, which waits ") == 1, text
    assert run.records()[-1]["ranks/data_wait_max"] > 0.2
