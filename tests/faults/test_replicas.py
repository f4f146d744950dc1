"""Silent changes on one rank of a replicated run: steps are skipped on all ranks, copies that differ stop the run or
send it back, and no checkpoint ever holds them."""

import pytest
from fault_harness import assert_same

DDP = ("--engine.name", "ddp")
EVERY = ("--faults.replica-check-every", "1")


@pytest.mark.slow
def test_a_nan_on_one_rank_after_the_reduction_skips_the_step_on_all(make_run):
    run = make_run(*DDP, *EVERY, ranks=2)
    attempt = run.finish(faults=[{"kind": "nan_after_reduction", "step": 7, "rank": 1}])
    assert run.records()[-1]["skipped"] == 1
    assert "step 7: " in attempt.text()
    assert "step skipped, weights unchanged" in attempt.text()
    expected = make_run(*DDP, ranks=2)
    expected.finish(faults=[{"kind": "nan_gradients", "step": 7}])  # the same, before the reduction
    assert run.weights().keys() == expected.weights().keys()
    losses = [record["loss"] for record in run.records() if record["step"] != 7]
    assert losses == [record["loss"] for record in expected.records() if record["step"] != 7]


@pytest.mark.slow
def test_a_changed_weight_stops_the_run_and_the_next_start_goes_on(make_run, two_copies):
    run = make_run(*DDP, "--faults.replica-check-every", "3", ranks=2)
    attempt = run.start(faults=[{"kind": "flip_a_bit", "step": 13, "rank": 1}])
    assert attempt.wait() == [1, 1]
    # Step 14 is not compared; step 15 is, before its checkpoint is written.
    assert "step 15: the copies of the model are not the same any more: ranks 0-1 (node " in attempt.text()
    assert "Traceback" not in attempt.text()
    assert run.checkpoints() == ["step-00000005", "step-00000010"]
    run.finish()
    assert_same(run, two_copies)


@pytest.mark.slow
def test_a_changed_weight_sends_the_run_back(make_run, two_copies):
    run = make_run(*DDP, *EVERY, "--faults.on-replica-difference", "restore", ranks=2)
    attempt = run.finish(faults=[{"kind": "flip_a_bit", "step": 13, "rank": 1, "once": True}])
    assert "step 13: the copies of the model" in attempt.text()
    assert "back to step-00000010 (restore 1 of at most 3)" in attempt.text()
    assert_same(run, two_copies)
    assert [(r["step"], r["difference"], r["restores"]) for r in run.records("restore")] == [(10, 13, 1)]
    assert run.records()[-1]["restores"] == 1
    assert run.records()[-1]["goodput/rewinds"] > 0


@pytest.mark.slow
def test_a_rank_that_changes_its_weights_again_and_again_ends_the_run(make_run):
    options = (*DDP, *EVERY, "--faults.on-replica-difference", "restore", "--faults.max-rewinds", "1")
    run = make_run(*options, ranks=2)
    attempt = run.start(faults=[{"kind": "flip_a_bit", "step": 13, "rank": 1}])
    assert attempt.wait() == [1, 1]
    assert "the run has gone back 1 times already (faults.max_rewinds)" in attempt.text()
    assert run.checkpoints() == ["step-00000005", "step-00000010"]
