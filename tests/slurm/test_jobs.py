"""Several jobs on one run, one job of several runs, and the commands that look after them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from comparisons import ENTRIES, TINY
from slurm_runs import PATIENT, STEPS, SlurmRun, assert_undisturbed, matmix
from stories import tells

from matmix.launch.jobs.launches import preparation_home, read_jobs
from matmix.train.process.exits import EXIT_OK, EXIT_STOPPED
from matmix.train.recipe_files import find_recipe

# -- chains and cancelled jobs ---------------------------------------------------------------------------------------


def chained(stage):
    """Two jobs of one name, of which the first is cancelled in the middle."""
    run = stage.run("chained").submit(stage.dataset, "--dependency", "singleton")
    run.submit(stage.dataset, "--dependency", "singleton")
    seen = {}
    yield run, seen
    first, second = run.jobs
    run.wait_for_step(60, job=first)
    seen["second meanwhile"] = stage.cluster.info(second)
    stage.cluster.run("scancel", first)
    stage.cluster.wait_for(first, "CANCELLED")
    seen["saved"] = run.newest_valid_step()
    stage.cluster.wait_for_end(second)


@pytest.mark.slow
@tells(chained, alone=1)
def test_scancel_leaves_a_valid_checkpoint_and_the_next_job_of_the_chain_goes_on_from_it(told, alone):
    run, seen = told
    first, second = run.jobs
    waiting = seen["second meanwhile"]
    assert (waiting["JobState"], waiting["Reason"]) == ("PENDING", "Dependency")
    assert 50 <= seen["saved"] < STEPS
    assert run.cluster.info(first)["Restarts"] == "0"  # cancelled is cancelled
    info = run.cluster.info(second)
    assert (info["JobState"], info["Restarts"]) == ("COMPLETED", "0"), run.output(second)
    assert f"resumed from step-{seen['saved']:08d}" in run.output(second)
    assert_undisturbed(run, alone)


def phased(stage):
    """A run of two phases that is told to save and stop in the second one."""
    recipe = stage.folder / "phased.toml"
    recipe.write_text(f"{find_recipe('debug_mru').read_text()}\n[[phase]]\n[[phase]]\n")
    run = stage.run("phased").submit(stage.dataset, recipe=str(recipe))
    phases = [SlurmRun(stage.cluster, run.path / f"phase-{number}") for number in (1, 2)]
    yield run, phases
    phases[1].wait_for_step(5, job=run.job)
    stage.cluster.run("scancel", "--batch", "--signal=USR2", run.job)
    stage.cluster.wait_for_end(run.job)


@pytest.mark.slow
@tells(phased, alone=1)
def test_phases_are_one_job_which_goes_on_in_the_one_that_was_stopped(told, alone):
    run, (first, second) = told
    info = run.cluster.info(run.job)
    assert (info["JobState"], info["Restarts"]) == ("COMPLETED", "1"), run.output()
    assert [(attempt.phase, attempt.code) for attempt in run.attempts()] == [(2, EXIT_STOPPED), (2, EXIT_OK)]
    assert_undisturbed(first, alone)
    assert [step for step, *_ in second.curve()] == list(range(1, STEPS + 1))
    assert second.curve()[0] != first.curve()[0]  # it has begun with other weights


# -- arrays ----------------------------------------------------------------------------------------------------------


def swept(stage):
    """An array of three runs; one of its tasks is told to save and stop."""
    sweep = stage.run("swept").submit(stage.dataset, "--sweep", "optimizer.lr=1e-2,2e-2,3e-2")
    tasks = [f"{sweep.job}_{number}" for number in range(3)]
    points = [SlurmRun(stage.cluster, sweep.path / f"lr={lr}") for lr in ("1e-2", "2e-2", "3e-2")]
    yield sweep, points, tasks
    points[1].wait_for_step(5, job=tasks[1])
    stage.cluster.run("scancel", "--batch", "--signal=USR2", tasks[1])
    for task in tasks:
        stage.cluster.wait_for_end(task)


@pytest.mark.slow
@tells(swept, alone=1)
def test_an_array_of_runs_of_which_one_is_interrupted(told, alone):
    sweep, points, tasks = told
    infos = [sweep.cluster.info(task) for task in tasks]
    assert [info["JobState"] for info in infos] == ["COMPLETED"] * 3
    assert [info["Restarts"] for info in infos] == ["0", "1", "0"]  # the others were left alone
    assert [attempt.code for attempt in points[1].attempts()] == [EXIT_STOPPED, EXIT_OK]
    assert_undisturbed(points[0], alone)
    curves = [point.curve() for point in points]
    assert all([step for step, *_ in curve] == list(range(1, STEPS + 1)) for curve in curves)
    assert len({curve[-1] for curve in curves}) == 3  # each task has trained with its own value


def prepared(stage):
    """Three parts of a preparation, of which the second fails, and is made again alone."""
    healed, out = stage.folder / "healed", stage.folder / "joined"
    breaks = f'[ "${{SLURM_ARRAY_TASK_ID:-}}" != 2 ] || [ -e {healed} ] || exit 3'
    words = ["slurm", "--prepare", "--parts", "3", str(Path(stage.dataset).parent / "verses.jsonl"), "--out", str(out)]
    words += ["--vocab-size", "320", "--validation-fraction", "0.1", "--processes", "1", "--setup", breaks]
    assert matmix("launch", *words) == 0
    home = preparation_home(str(out))
    yield stage, out, home
    parts, merge = [job.job for job in read_jobs(home)]
    for number in (1, 2, 3):
        stage.cluster.wait_for_end(f"{parts}_{number}")
    stage.cluster.wait_for(merge, "CANCELLED")
    assert not (out / "manifest.json").exists()
    healed.touch()
    assert matmix("launch", "resubmit", str(out)) == 0
    stage.cluster.wait_for(read_jobs(home)[-1].job, "COMPLETED")


@pytest.mark.slow
@tells(prepared)
def test_an_array_of_parts_is_joined_once_a_failed_part_was_made_again(told):
    stage, out, home = told
    first, _, second, _ = [job.job for job in read_jobs(home)]
    states = {name: stage.cluster.info(f"{first}_{name}")["JobState"] for name in (1, 2, 3)}
    assert states == {1: "COMPLETED", 2: "FAILED", 3: "COMPLETED"}
    assert stage.cluster.info(f"{second}_2")["JobState"] == "COMPLETED"
    with pytest.raises(KeyError):
        stage.cluster.info(f"{second}_1")
    joined, whole = (json.loads((Path(path) / "manifest.json").read_text()) for path in (out, stage.dataset))
    for split in ("train", "validation"):
        for count in ("documents", "tokens"):
            assert joined["splits"][split][count] == whole["splits"][split][count]


def compared(stage):
    """Two mixers with two seeds each, submitted as one array and tabulated afterwards."""
    recipe, home = stage.folder / "compared.toml", stage.folder / "compared"
    recipe.write_text(TINY + ENTRIES)
    words = [str(recipe), "--run-dir", str(home), "--data.path", stage.dataset, "--model.vocab-size", "320"]
    assert matmix("compare", *words, "--slurm", "--nodes", "1", "--tasks-per-node", "1", *PATIENT) == 0
    (job,) = read_jobs(home)
    yield words, home, job
    for task in range(job.tasks):
        stage.cluster.wait_for_end(f"{job.job}_{task}")


@pytest.mark.slow
@tells(compared)
def test_a_comparison_is_an_array_that_is_tabulated_afterwards(told, capsys):
    words, home, job = told
    assert job.tasks == 4
    assert matmix("compare", *words, "--report") == 0
    table = capsys.readouterr().out
    with (home / "report/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["entry"] for row in rows} == {"attention", "Hydra, 2 x"}
    assert all(row["n"] == "2" for row in rows), table


# -- status, cancel, resubmit ----------------------------------------------------------------------------------------


def looked_after(stage):
    run = stage.run("looked-after").submit(stage.dataset)
    yield run
    run.wait_for_step(5)
    assert matmix("launch", "cancel", str(run.path)) == 0
    stage.cluster.wait_for_end(run.job)
    assert matmix("launch", "resubmit", str(run.path)) == 0
    stage.cluster.wait_for_end(run.job)


@tells(looked_after)
def test_cancel_saves_and_resubmit_goes_on(told, capsys):
    first, second = told.jobs
    assert told.cluster.info(first)["Restarts"] == "0"
    assert told.attempts()[0].code == EXIT_STOPPED
    assert told.cluster.info(second)["JobState"] == "COMPLETED", told.output()
    assert f"resumed from step-{told.attempts()[0].step:08d}" in told.output(second)
    assert [step for step, *_ in told.curve()] == list(range(1, STEPS + 1))
    assert matmix("launch", "status", str(told.path)) == 0
    shown = capsys.readouterr().out
    assert second in shown
    assert f"{STEPS}" in shown
