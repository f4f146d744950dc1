"""The loss-spike guard, with a stretch of data whose losses are ten times what they should be."""

import json

import pytest
from fault_harness import assert_same

# Step 18 of a run that nothing happened to reads the samples 68 to 71.
_SPIKE = {"kind": "high_loss", "first": 68, "last": 71, "factor": 10.0}
_GUARD = ("--faults.spike-factor", "3", "--faults.spike-window", "8")


@pytest.mark.slow
def test_a_spike_is_left_out_and_kills_change_nothing(make_run, two_ranks):
    alone = make_run(*_GUARD, ranks=2)
    attempt = alone.finish(faults=[_SPIKE])
    assert "back to step-00000015, leaving out the samples 60 to 71 (rewind 1 of 3)" in attempt.text()
    assert alone.curve()[:15] == two_ranks.curve()[:15]
    assert [step for step, *_ in alone.curve()] == list(range(1, 31))
    assert max(loss for _, loss, *_ in alone.curve()) < 7
    assert [record["rewinds"] for record in alone.records()] == [0] * 15 + [1] * 15
    assert [(r["step"], r["spike"]) for r in alone.records("rewind")] == [(15, 18)]
    # The data went on where the spike was read, while the steps went back.
    assert json.loads((alone.newest() / "checkpoint.json").read_text())["extra"]["data"]["samples"] == 4 * 30 + 12

    harmed = make_run(*_GUARD, ranks=2)
    for step in (17, 23):  # after going back, before and after the next checkpoint
        attempt = harmed.start(faults=[_SPIKE, {"kind": "pause", "step": step, "rewinds": 1, "markers": True}])
        attempt.wait_for_mark("pause")
        attempt.kill()
    harmed.finish(faults=[_SPIKE])
    assert_same(harmed, alone)
    assert harmed.records("rewind") == alone.records("rewind")


@pytest.mark.slow
def test_it_gives_up(make_run):
    run = make_run(*_GUARD, "--faults.max-rewinds", "1", ranks=1)
    attempt = run.start(faults=[_SPIKE | {"last": 75}])  # what is read next spikes, too
    assert attempt.wait() == [1]
    assert "the run has gone back 1 times already (faults.max_rewinds)" in attempt.text()
    assert "Traceback" not in attempt.text()
