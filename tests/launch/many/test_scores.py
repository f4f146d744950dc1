"""When a run is finished, and what runs with several seeds say together."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest
from comparisons import finish
from labelled import MODEL

from matmix.launch.many.planned import PlannedRun, other_settings
from matmix.launch.many.runs import _finished_line
from matmix.launch.many.scores import read_scores
from matmix.train.recipe import load_config

BEST = ["--evaluation.best", "accuracy", "--evaluation.patience", "2"]


@pytest.fixture
def task(tmp_path):
    """Makes the task of a seed."""
    (tmp_path / "recipe.toml").write_text(MODEL)

    def make(seed: int = 0, *words: str) -> PlannedRun:
        words = ["--seed", str(seed), "--run-dir", str(tmp_path / "runs" / f"seed-{seed}"), *words]
        return PlannedRun(entry="mine", seed=seed, config=load_config(str(tmp_path / "recipe.toml"), words))

    return make


def _found(step: int, accuracy: float, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 1 - accuracy, "accuracy": accuracy, "f1": accuracy / 2, "matthews": 0.125, **more}


def test_a_run_whose_patience_ended_is_finished(task):
    one = task(0, *BEST)
    assert not one.is_finished()
    best = {"metric": "accuracy", "step": 2, "value": 0.5, "waited": 2}
    finish(one, _found(6, 0.25))
    summary = {"step": 6, "validation": _found(6, 0.25)}
    for said, finished in (
        ({**summary, "best": best}, True),
        ({**summary, "best": {**best, "waited": 1}}, False),
        ({**summary, "best": {**best, "metric": "f1"}}, False),
        ({**summary, "best": "accuracy"}, False),
        (summary, False),
        ({**summary, "step": 12}, True),
    ):
        (one.run.path / "summary.json").write_text(json.dumps(said))
        assert one.is_finished() == finished, said
    (one.run.path / "summary.json").write_text(json.dumps({**summary, "best": best}))
    assert not task(0, *BEST[:3], "3").is_finished()  # who has more patience goes on
    assert not task(0).is_finished()


def test_the_steps_of_epochs_are_those_that_the_run_has_counted(task):
    one = task(0, "--epochs", "2")
    assert one.last_step is None
    assert not one.is_finished()
    counted = dataclasses.replace(one.config, steps=40, stop_step=40)
    finish(dataclasses.replace(one, config=counted), _found(40, 0.5))
    assert one.last_step == 40
    assert one.is_finished()
    assert other_settings(one) == ""
    more = task(0, "--epochs", "3")
    assert not more.is_finished()
    assert "epochs: 2.0 there, 3.0 here" in other_settings(more)


def test_a_finished_run_tells_the_first_metric_of_its_task(task):
    finish(task(), _found(12, 0.75))
    assert _finished_line(task(), 60, "a minute").startswith("mine, seed 0: loss 0.2500, accuracy 75.0%, ")


def test_the_last_evaluations_of_the_finished_runs_are_summarised(task):
    accuracies = [0.5, 0.75, 0.625]
    tasks = [task(seed) for seed in range(4)]
    for one, accuracy in zip(tasks, accuracies, strict=False):  # that of the last seed is not there
        finish(one, _found(12, accuracy, calibration_error=0.1, control_accuracy=0.5))
    scores = read_scores(tasks)
    assert [metric.name for metric in scores.known] == ["accuracy", "f1", "matthews", "calibration_error", "loss"]
    assert scores.values("accuracy") == accuracies
    assert scores.values("matthews") == [0.125] * 3
    text = scores.text()
    header, _, first, *_ = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    assert header == ["metric", "mean", "seed 0", "seed 1", "seed 2", "control"]
    assert first == ["accuracy (%)", "62.5 ± 12.5", "50.0", "75.0", "62.5", "50.0% (the most frequent class)"]
    assert "Mean ± sample standard deviation over 3 seeds: the last evaluation of each seed (step 12, 12, 12)." in text
    said = scores.json()
    assert said["evaluation"] == "last"
    assert said["metrics"]["accuracy"] == {
        "mean": statistics.fmean(accuracies),
        "deviation": statistics.stdev(accuracies),
        "seeds": {"0": 0.5, "1": 0.75, "2": 0.625},
        "control": 0.5,
    }
    assert "control" not in said["metrics"]["matthews"]


def test_best_evaluations_are_summarised_where_each_run_knows_its_own(task):
    tasks = [task(seed, *BEST) for seed in range(2)]
    for one, step in zip(tasks, (4, 8), strict=True):
        best = {"metric": "accuracy", "step": step, "value": 0.75, "waited": 0}
        finish(one, _found(12, 0.5), best=best)
        with (one.run.path / "metrics.jsonl").open("a") as file:
            for at, accuracy in ((4, 0.75 - one.seed / 4), (8, 0.75), (12, 0.5)):
                file.write(json.dumps({"kind": "validation", **_found(at, accuracy)}) + "\n")
    scores = read_scores(tasks)
    assert scores.values("f1") == [0.375, 0.375]
    text = scores.text()
    assert "the best evaluation of each seed by accuracy (step 4, 8)" in text
    assert scores.json()["steps"] == {"0": 4, "1": 8}
    with (tasks[1].run.path / "metrics.jsonl").open("a") as file:  # records hold no NaN
        file.write(json.dumps({"kind": "validation", **_found(8, 0.75), "loss": None}) + "\n")
    assert math.isnan(read_scores(tasks).values("loss")[1])
    assert "nan" in read_scores(tasks).text()
    (tasks[1].run.path / "metrics.jsonl").unlink()  # then no seed's best stands beside another's last
    scores = read_scores(tasks)
    assert scores.values("f1") == [0.25, 0.25]
    assert "the last evaluation of each seed" in scores.text()


def test_without_a_finished_run_there_is_nothing_to_summarise(task):
    assert read_scores([task(0), task(1)]).known == []
