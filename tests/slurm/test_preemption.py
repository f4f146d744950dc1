"""Jobs that are interrupted start again by themselves and end as if nothing had happened, bit for bit."""

from __future__ import annotations

import signal

import pytest
from cluster import wait_until
from slurm_runs import STEPS, assert_undisturbed
from stories import tells

from matmix.train.process.exits import EXIT_OK, EXIT_STOPPED

# -- nothing happens -------------------------------------------------------------------------------------------------


def two_nodes(stage):
    run = stage.run("two-nodes").submit(stage.dataset, nodes=2)
    yield run
    stage.cluster.wait_for_end(run.job)


@pytest.mark.slow
@tells(two_nodes, alone=2)
def test_a_job_on_two_nodes_trains_as_without_slurm(told, alone):
    info = told.cluster.info(told.job)
    assert (info["JobState"], info["NumNodes"], info["Restarts"]) == ("COMPLETED", "2", "0"), told.output()
    assert_undisturbed(told, alone)
    assert [(attempt.code, attempt.step) for attempt in told.attempts()] == [(EXIT_OK, STEPS)]
    assert f"Finished at step {STEPS}" in told.output()  # rank 0's words are the job's
    assert (told.path / "logs" / told.attempts()[0].attempt / "rank-00001.log").is_file()


# -- a signal before the end -----------------------------------------------------------------------------------------


def signalled(stage):
    run = stage.run("signalled").submit(stage.dataset, nodes=2)
    yield run
    run.wait_for_step(5)
    stage.cluster.run("scancel", "--batch", "--signal=USR2", run.job)
    stage.cluster.wait_for_end(run.job)


@tells(signalled, alone=2)
def test_usr2_saves_requeues_and_resumes(told, alone):
    info = told.cluster.info(told.job)
    assert (info["JobState"], info["Restarts"]) == ("COMPLETED", "1"), told.output()
    first, second = told.attempts()
    assert (first.code, second.code) == (EXIT_STOPPED, EXIT_OK)
    assert first.saved_step == first.step < STEPS  # the step at which the signal was heard, nothing is done twice
    assert f"resumed from step-{first.step:08d}" in told.output()
    assert f"Finished at step {STEPS}" in told.output()  # rank 0's words are the job's
    assert (told.path / "logs" / second.attempt / "rank-00001.log").is_file()
    assert_undisturbed(told, alone)


def signalled_early(stage):
    """Once before the batch script has started any rank, and once while the rank imports its libraries."""
    cluster = stage.cluster
    run = stage.run("signalled-early").submit(stage.dataset)
    yield run
    wait_until(lambda: cluster.hears(run.job, signal.SIGUSR2), "the batch script", poll=0.02)
    cluster.run("scancel", "--batch", "--signal=USR2", run.job)
    cluster.wait_for(run.job, "RUNNING", restarts=1)
    wait_until(lambda: cluster.find_processes(run.job, "matmix.launch.jobs.rank"), "the rank's process", poll=0.5)
    cluster.run("scancel", "--batch", "--signal=USR2", run.job)
    cluster.wait_for_end(run.job)


@pytest.mark.slow
@tells(signalled_early, alone=1)
def test_usr2_before_the_first_step_requeues_as_well(told, alone):
    info = told.cluster.info(told.job)
    assert (info["JobState"], info["Restarts"]) == ("COMPLETED", "2"), told.output()
    assert all(attempt.signalled for attempt in told.attempts()[:2])
    assert_undisturbed(told, alone)


# -- without warning -------------------------------------------------------------------------------------------------


def requeued(stage):
    run = stage.run("requeued").submit(stage.dataset, nodes=2)
    yield run
    run.wait_for_step(60)
    stage.cluster.run("scontrol", "requeue", run.job)
    stage.cluster.wait_for_end(run.job)


@pytest.mark.slow
@tells(requeued, alone=2)
def test_requeue_from_outside_resumes(told, alone):
    info = told.cluster.info(told.job)
    assert (info["JobState"], info["Restarts"]) == ("COMPLETED", "1"), told.output()
    assert "resumed from step-" in told.output()
    assert_undisturbed(told, alone)


def moved(stage):
    cluster = stage.cluster
    run = stage.run("moved").submit(stage.dataset, "--partition", "shaky", nodes=2)
    yield run
    run.wait_for_step(60)
    broken = cluster.nodes["shaky"][1]
    cluster.set_down(broken)
    try:
        cluster.wait_for_end(run.job)
    finally:
        cluster.resume(broken)


@pytest.mark.slow
@tells(moved, alone=2)
def test_a_node_that_is_set_down_moves_the_job_to_others(told, alone):
    first, _, third = told.cluster.nodes["shaky"]
    info = told.cluster.info(told.job)
    assert (info["JobState"], info["Restarts"]) == ("COMPLETED", "1"), told.output()
    assert told.cluster.hostnames(info["NodeList"]) == [first, third]
    assert "resumed from step-" in told.output()
    assert_undisturbed(told, alone)


# -- what takes minutes ----------------------------------------------------------------------------------------------


def crashed(stage):
    cluster = stage.cluster
    run = stage.run("crashed").submit(stage.dataset, "--partition", "mortal", nodes=2)
    yield run
    run.wait_for_step(60)
    dead = cluster.nodes["mortal"][1]
    cluster.kill_node(dead)
    try:
        cluster.wait_for_end(run.job)
    finally:
        cluster.resume(dead)


@pytest.mark.slow
@tells(crashed, alone=2)
def test_a_node_that_dies_is_replaced(told, alone):
    info = told.cluster.info(told.job)
    assert info["JobState"] == "COMPLETED", told.output()
    assert int(info["Restarts"]) >= 1
    assert "resumed from step-" in told.output()
    assert_undisturbed(told, alone)


def out_of_time(stage):
    """Limits come in minutes, signals up to a minute early: a step takes as long as it takes for one to come."""
    cluster = stage.cluster
    run = stage.run("out-of-time").submit(stage.dataset, "--time", "2", "--save-seconds", "60")
    yield run
    run.wait_for_step(60)
    ranks = cluster.find_processes(run.job, "matmix.launch.jobs.rank")
    for rank in ranks:
        rank.suspend()
    wait_until(lambda: "USR2: telling the ranks" in run.output(), "Slurm's signal before the time limit", seconds=200)
    for rank in ranks:
        rank.resume()
    cluster.wait_for_end(run.job, seconds=500)


@pytest.mark.slow
@tells(out_of_time, alone=1)
def test_a_job_goes_on_after_its_time_limit(told, alone):
    info = told.cluster.info(told.job)
    assert info["JobState"] == "COMPLETED", told.output()
    assert int(info["Restarts"]) >= 1
    assert told.attempts()[0].signalled
    assert told.attempts()[0].code == EXIT_STOPPED
    assert_undisturbed(told, alone)


def displaced(stage):
    """By a job that Slurm prefers: all ranks hear SIGTERM, and the nodes are taken away after the grace time."""
    run = stage.run("displaced").submit(stage.dataset, "--partition", "lent", nodes=2)
    yield run
    run.wait_for_step(60)
    nodes = ",".join(stage.cluster.nodes["lent"])
    urgent = stage.cluster.submit("#!/bin/sh\nsrun sleep 5\n", "-p", "urgent", "-N2", "--exclusive", "-w", nodes)
    stage.cluster.wait_for(urgent, "COMPLETED")
    stage.cluster.wait_for_end(run.job)


@pytest.mark.slow
@tells(displaced, alone=2)
def test_a_job_that_is_displaced_by_a_more_urgent_one_comes_back(told, alone):
    info = told.cluster.info(told.job)
    assert info["JobState"] == "COMPLETED", told.output()
    assert int(info["Restarts"]) >= 1
    assert told.attempts()[0].code == EXIT_STOPPED
    assert_undisturbed(told, alone)
