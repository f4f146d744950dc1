"""Scores of fine-tunings that are alike but for their seeds: those of the best evaluations where `evaluation.best` says
which these are, else those of the last ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from matmix.data.artifacts import read_json_lines
from matmix.launch.many.spread import metric_in_words, spread
from matmix.launch.many.table import markdown
from matmix.launch.many.task import Task
from matmix.train.tasks.base import Metric
from matmix.train.tasks.metrics import control_of, control_words


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Of the finished ones among some runs, in their order."""

    tasks: list[Task]
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
        """What the trivial answer scores, which is the same for all runs, in words; "" where there is none."""
        return control_words(metric, self.evaluations[0])


def read_scores(tasks: Sequence[Task]) -> Scores:
    """What the records of the runs say. The best evaluations are taken where every finished run knows its own."""
    finished = [task for task in tasks if task.is_finished()]
    best = [_best_evaluation(task) for task in finished]
    if finished and all(best):
        return Scores(finished, finished[0].config.evaluation.best, best)
    return Scores(finished, "", [_summary(task)["validation"] for task in finished])


def summarize(tasks: Sequence[Task]) -> dict[str, list[float]]:
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


def _best_evaluation(task: Task) -> dict[str, float]:
    """The metrics of the run's best evaluation, and its "step"; {} where none is known."""
    metric, best = task.config.evaluation.best, _summary(task).get("best")
    if not (metric and isinstance(best, dict) and best.get("metric") == metric):
        return {}
    records = read_json_lines(task.run.path / "metrics.jsonl")
    found = [one for one in records if one.get("kind") == "validation" and one.get("step") == best.get("step")]
    return {name: value for name, value in found[-1].items() if name != "kind"} if found else {}


def _summary(task: Task) -> dict[str, Any]:
    summary = task.run.read_summary()
    assert summary is not None, "the run is finished"
    return summary
