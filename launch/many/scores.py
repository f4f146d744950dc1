"""Scores over runs that differ in their seeds, and the runs of one config with several seeds."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import read_json_lines
from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import is_url
from matmix.launch.many.planned import PlannedRun, check_directories
from matmix.launch.many.runs import describe_failures, listening, run_tasks, say
from matmix.train.config import RunConfig
from matmix.train.run.directory import RunDirectory
from matmix.train.tasks.base import Metric
from matmix.train.tasks.metrics import control_of, control_words


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Mean, and sample standard deviation where there are several values."""

    mean: float
    deviation: float | None
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """None where there are no values. Where one is no finite number, neither is the mean, and there is no deviation."""
    if not values:
        return None
    several = len(values) > 1 and all(map(math.isfinite, values))
    return Spread(statistics.fmean(values), statistics.stdev(values) if several else None, len(values))


def mean_in_words(values: Sequence[float], digits: int, *, scale: float = 1) -> str:
    """Returns words such as "1.2345 ± 0.0012"; without a deviation where there is none, "" without values. scale: a
    factor."""
    found = spread([scale * value for value in values])
    if found is None:
        return ""
    text = f"{found.mean:.{digits}f}"
    return text if found.deviation is None else f"{text} ± {found.deviation:.{digits}f}"


def metric_in_words(values: Sequence[float], metric: Metric) -> str:
    """The same of a metric, shares in percent, as its heading says."""
    return mean_in_words(values, metric.digits, scale=100 if metric.unit == "%" else 1)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns stand below each other also as plain text."""
    rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Holds the scores of the finished ones among some runs, in their order."""

    tasks: list[PlannedRun]
    best: str
    """The metric by which an evaluation of each run was chosen as its best; "" = the last one of each."""
    evaluations: list[dict[str, float]]
    """The metrics of each run, and their "step"."""

    @property
    def known(self) -> list[Metric]:
        """The metrics of the task that all runs have, the most telling first, the loss last."""
        if not self.tasks:
            return []
        task = self.tasks[0].config.task()
        all_of = *task.metrics, task.loss_metric
        return [metric for metric in all_of if all(metric.name in found for found in self.evaluations)]

    def values(self, metric: str) -> list[float]:
        """A metric of each run."""
        return [found[metric] for found in self.evaluations]

    def control(self, metric: Metric) -> str:
        """Returns in words what the trivial answer scores, which is the same for all runs; "" where there is none."""
        return control_words(metric, self.evaluations[0])


def read_scores(tasks: Sequence[PlannedRun]) -> Scores:
    """Returns what the records of the runs say. The best evaluations are taken where every finished run knows its
    own."""
    finished = [task for task in tasks if task.is_finished()]
    best = [_best_evaluation(task) for task in finished]
    if finished and all(best):
        return Scores(finished, finished[0].config.evaluation.best, best)
    return Scores(finished, "", [_summary(task)["validation"] for task in finished])


def summarize(tasks: Sequence[PlannedRun]) -> dict[str, list[float]]:
    """Metric -> its value of each finished run, in the order of the tasks; the most telling metric first.

    The values are those of the best evaluation of each run where `evaluation.best` is set, else those of the last one.
    """
    scores = read_scores(tasks)
    return {metric.name: scores.values(metric.name) for metric in scores.known}


def scores_text(scores: Scores) -> str:
    """A table of mean, sample standard deviation and each seed's value, with what is to be known about it."""
    seeds = [f"seed {task.seed}" for task in scores.tasks]
    rows = []
    for metric in scores.known:
        values = scores.values(metric.name)
        each = (metric_in_words([value], metric) for value in values)
        rows.append([metric.heading, metric_in_words(values, metric), *each, scores.control(metric)])
    steps = ", ".join(f"{found['step']:,}" for found in scores.evaluations)
    which = f"the best evaluation of each seed by {scores.best}" if scores.best else "the last evaluation of each seed"
    count = len(seeds)
    over = f"Mean ± sample standard deviation over {count} seeds" if count > 1 else "One seed"
    return f"{markdown(['metric', 'mean', *seeds, 'control'], rows)}\n\n{over}: {which} (step {steps})."


def scores_json(scores: Scores) -> dict[str, Any]:
    """The same numbers, not rounded."""
    seeds = [str(task.seed) for task in scores.tasks]
    metrics = {}
    for metric in scores.known:
        values = scores.values(metric.name)
        over = spread(values)
        assert over is not None, "a metric that is known has values"
        each = dict(zip(seeds, values, strict=True))
        metrics[metric.name] = {"mean": over.mean, "deviation": over.deviation, "seeds": each}
        if (control := control_of(metric, scores.evaluations[0])) is not None:
            metrics[metric.name]["control"] = control
    steps = {seed: found["step"] for seed, found in zip(seeds, scores.evaluations, strict=True)}
    return {"evaluation": f"best {scores.best}" if scores.best else "last", "steps": steps, "metrics": metrics}


def _best_evaluation(task: PlannedRun) -> dict[str, float]:
    """The metrics of the run's best evaluation, and its "step"; {} where none is known."""
    metric, best = task.config.evaluation.best, _summary(task).get("best")
    if not (metric and isinstance(best, dict) and best.get("metric") == metric):
        return {}
    records = read_json_lines(task.run.path / "metrics.jsonl")
    found = [one for one in records if one.get("kind") == "validation" and one.get("step") == best.get("step")]
    return {name: value for name, value in found[-1].items() if name != "kind"} if found else {}


def _summary(task: PlannedRun) -> dict[str, Any]:
    summary = task.run.read_summary()
    assert summary is not None, "the run is finished"
    return summary


SCORES = "seeds.json"


def tasks_of_seeds(config: RunConfig, seeds: Sequence[int]) -> list[PlannedRun]:
    """The runs of `config` with each seed, in folders of their own in its run directory.

    Raises ValueError (one line) for seeds that cannot be, and a run directory that holds something else.
    """
    if any(seed < 0 for seed in seeds):
        raise ValueError(f"--seeds: seeds are integers >= 0, got {min(seeds)}")
    if doubled := [seed for seed in seeds if seeds.count(seed) > 1]:
        raise ValueError(f"--seeds: {doubled[0]} is given twice")
    home = Path(config.run_dir)
    if is_url(config.run_dir):
        raise ValueError(f"--run-dir {config.run_dir}: runs with several seeds lie in a folder of this machine")
    if home.exists() and not home.is_dir():
        raise ValueError(f"run_dir {home} is a file; choose another --run-dir")
    if RunDirectory(home).config_path.is_file():
        raise ValueError(f"{home} is a run, and not a folder for the runs of several seeds: give another --run-dir")
    tasks = [
        PlannedRun(
            entry=home.name,
            seed=seed,
            config=dataclasses.replace(config, seed=seed, run_dir=str(home / f"seed-{seed}")),
        )
        for seed in seeds
    ]
    check_directories(tasks)
    return tasks


def train_seeds(tasks: Sequence[PlannedRun], home: Path, parallel: int) -> int:
    """Trains what is not finished, prints the scores of what is, and writes them into `home`; returns the exit code."""
    with listening():
        ended = run_tasks(tasks, parallel)
    if ended.stopped:
        say("Stopped; what was running is saved. The same command goes on from there.")
        return ended.code
    scores = read_scores(tasks)
    if scores.tasks:
        write_atomic(home / SCORES, json.dumps(scores_json(scores), indent=2) + "\n")
        say(f"\n{scores_text(scores)}\n{home / SCORES}")
    if missing := [str(task.seed) for task in tasks if task not in scores.tasks]:
        say(f"Not finished: seed {', '.join(missing)}.")
    if ended.failures:
        say("\n" + describe_failures(ended.failures))
    return ended.code
