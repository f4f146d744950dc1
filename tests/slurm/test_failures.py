"""Jobs that fail: what starts again, what does not, and what the output says about it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stories import tells

from matmix.train.process.exits import EXIT_FAILED, EXIT_USER

# -- the run's own fault ---------------------------------------------------------------------------------------------


def diverging(stage):
    run = stage.run("diverging").submit(stage.dataset, "--optimizer.lr", "1e30", "--max-bad-steps", "1")
    yield run
    stage.cluster.wait_for_end(run.job)


@pytest.mark.slow
@tells(diverging)
def test_a_step_that_fails_twice_ends_the_job(told):
    info = told.cluster.info(told.job)
    assert (info["JobState"], info["Restarts"]) == ("FAILED", "1"), told.output()
    first, second = told.attempts()
    assert first.code == second.code == EXIT_FAILED
    assert first.step == second.step
    last = told.output().splitlines()[-1]
    assert "not started again" in last
    assert f"step {first.step} failed twice in a row" in last


def mistaken(stage):
    dataset = Path(shutil.copytree(stage.dataset, stage.folder / "lost-dataset"))
    run = stage.run("mistaken").submit(str(dataset))
    shutil.rmtree(dataset)
    yield run
    stage.cluster.wait_for_end(run.job)


@tells(mistaken)
def test_a_mistake_of_the_user_is_not_tried_again(told):
    info = told.cluster.info(told.job)
    assert (info["JobState"], info["Restarts"], info["ExitCode"]) == ("FAILED", "0", f"{EXIT_USER}:0"), told.output()
    assert "lost-dataset" in told.output().splitlines()[-1]
    assert "not started again" in told.output().splitlines()[-1]


# -- ranks and nodes that are missing --------------------------------------------------------------------------------


def absent(stage):
    """A rank that srun starts and that never gets as far as to look for the others."""
    prolog = stage.folder / "prolog.sh"
    prolog.write_text('#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] || exec sleep 1000\n', encoding="utf-8")
    prolog.chmod(0o755)
    run = stage.run("absent").submit(
        *(stage.dataset, "--setup", f"export SLURM_TASK_PROLOG={prolog}", "--max-requeues", "0"),
        *("--env", "MATMIX_RENDEZVOUS_SECONDS=15"),
        nodes=2,
    )
    yield run
    stage.cluster.wait_for_end(run.job)


@tells(absent)
def test_a_rank_that_does_not_arrive_is_named_with_its_node(told):
    info = told.cluster.info(told.job)
    assert (info["JobState"], info["Restarts"]) == ("FAILED", "0"), told.output()
    _, second = told.cluster.hostnames(info["NodeList"])
    assert f"1 of 2 ranks did not arrive within 15 s: rank 1 of node {second}" in told.output()


def mute(stage):
    """A node that is given to the job and then answers no more."""
    node = stage.cluster.nodes["mute"][1]
    silence = f"kill -STOP $(cat {stage.cluster.folder}/slurmd-{node}.pid)"
    run = stage.run("mute").submit(
        *(stage.dataset, "--partition", "mute", "--setup", silence, "--max-requeues", "0"),
        *("--sbatch-option", "no-requeue"),
        nodes=2,
    )
    yield run
    stage.cluster.wait_for_end(run.job)


@pytest.mark.slow
@tells(mute)
def test_a_node_that_does_not_answer_is_named(told):
    info = told.cluster.info(told.job)
    assert info["JobState"] in ("FAILED", "NODE_FAIL"), told.output()
    assert told.cluster.nodes["mute"][1] in told.output()
