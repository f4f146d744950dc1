"""Scores over runs that differ in their seeds, tables of them, and the runs of one config with several seeds."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matmix.data.artifacts import read_json_lines
from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import is_url
from matmix.launch.many import runs
from matmix.launch.many.planned import PlannedRun, check_directories, check_same_data, of_seed
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
    """Returns None without values. Where one is no finite number, neither is the mean, and there is no deviation."""
    if not values:
        return None
    several = len(values) > 1 and all(map(math.isfinite, values))
    return Spread(statistics.fmean(values), statistics.stdev(values) if several else None, len(values))


class ScoreColumn(NamedTuple):
    """A column of a table: the mean and deviation of a metric."""

    key: str  # the name of the metric
    heading: str
    task: str = ""  # of a score on a task: what a run without the number has not been fine-tuned on
    digits: int = 1
    scale: float = 100
    runs: int = 1  # values of each run

    @classmethod
    def of(cls, metric: Metric) -> ScoreColumn:
        """Makes the column of a metric, shares in percent, as its heading says."""
        scale = 100 if metric.unit == "%" else 1
        return cls(metric.name, metric.heading, digits=metric.digits, scale=scale)

    def words(self, values: Sequence[float]) -> str:
        """Returns words such as "1.2345 ± 0.0012", of the values times `scale`; "" without values."""
        if (over := spread([self.scale * value for value in values])) is None:
            return ""
        text = f"{over.mean:.{self.digits}f}"
        return text if over.deviation is None else f"{text} ± {over.deviation:.{self.digits}f}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes a table in Markdown whose columns stand below each other also as plain text."""
    lines = [[cell.replace("|", r"\|") for cell in line] for line in (headings, *rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    cells = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Writes a table as CSV, of rows by the names of the columns; None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_tables(
    folder: Path, text: str, files: Mapping[str, str | bytes], *, is_empty: bool, idle: Sequence[str] = ()
) -> str:
    """Writes the table `text` as table.md and these files into `folder`; returns what is shown of them. Tables that
    are there stay where no run is finished (`is_empty`): empty ones would say less. idle: entries that the table leaves
    out because none of their runs has begun."""
    if idle:
        text += f"\n\nNot begun: {'; '.join(idle)}."
    if is_empty and (folder / "table.md").is_file():
        return f"{text}\n\nNo run of this table is finished: {folder} is left as it was."
    folder.mkdir(parents=True, exist_ok=True)
    files = {"table.md": f"{text}\n", **files}
    for name, content in files.items():
        write_atomic(folder / name, content)
    return f"{text}\n\n{', '.join(str(folder / name) for name in files)}"


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
        """Lists the metrics of the task that all runs have, the most telling first, the loss last."""
        if not self.tasks:
            return []
        task = self.tasks[0].config.task()
        all_of = *task.metrics, task.loss_metric
        return [metric for metric in all_of if all(metric.name in metrics for metrics in self.evaluations)]

    def values(self, metric: str) -> list[float]:
        return [metrics[metric] for metrics in self.evaluations]

    def text(self) -> str:
        """Tabulates mean, sample standard deviation and each seed's value, with what is to be known about them."""
        rows = []
        for metric in self.known:
            values = self.values(metric.name)
            cells = map(ScoreColumn.of(metric).words, (values, *([value] for value in values)))
            rows.append([metric.heading, *cells, control_words(metric, self.evaluations[0])])
        headings = ["metric", "mean", *(f"seed {task.seed}" for task in self.tasks), "control"]
        count, steps = len(self.tasks), ", ".join(f"{metrics['step']:,}" for metrics in self.evaluations)
        which = f"the best evaluation of each seed by {self.best}" if self.best else "the last evaluation of each seed"
        over = f"Mean ± sample standard deviation over {count} seeds" if count > 1 else "One seed"
        return f"{markdown(headings, rows)}\n\n{over}: {which} (step {steps})."

    def json(self) -> dict[str, Any]:
        """Returns the same numbers, not rounded."""
        seeds = [str(task.seed) for task in self.tasks]
        metrics = {}
        for metric in self.known:
            values = self.values(metric.name)
            over, control = spread(values), control_of(metric, self.evaluations[0])
            assert over is not None, "a metric that is known has values"
            each = dict(zip(seeds, values, strict=True))
            metrics[metric.name] = {"mean": over.mean, "deviation": over.deviation, "seeds": each}
            if control is not None:
                metrics[metric.name]["control"] = control
        steps = dict(zip(seeds, self.values("step"), strict=True))
        return {"evaluation": f"best {self.best}" if self.best else "last", "steps": steps, "metrics": metrics}


def read_scores(tasks: Sequence[PlannedRun]) -> Scores:
    """Reads the records of the runs: the best evaluations where every finished run knows its own, else the last."""
    finished = [(task, task.run.read_summary()) for task in tasks if task.is_finished()]
    done, best = [task for task, _ in finished], [_best(*one) for one in finished]
    if done and all(best):
        return Scores(done, done[0].config.evaluation.best, best)
    return Scores(done, "", [summary["validation"] for _, summary in finished])


def _best(task: PlannedRun, summary: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics of a run's best evaluation, and its "step"; {} where none is known."""
    metric, best = task.config.evaluation.best, summary.get("best")
    if not (metric and isinstance(best, dict) and best.get("metric") == metric):
        return {}
    records = read_json_lines(task.run.path / "metrics.jsonl")
    its = [one for one in records if one.get("kind") == "validation" and one.get("step") == best.get("step")]
    values = its[-1].items() if its else ()
    return {name: math.nan if value is None else value for name, value in values if name != "kind"}


SCORES = "seeds.json"


def tasks_of_seeds(config: RunConfig, seeds: Sequence[int]) -> list[PlannedRun]:
    """Plans the runs of `config` with each seed, in folders of their own in its run directory. Raises ValueError (one
    line) for seeds that cannot be, and a run directory that holds something else."""
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
    tasks = [PlannedRun(entry=home.name, seed=seed, config=of_seed(config, seed, home)) for seed in seeds]
    check_directories(tasks)
    check_same_data(tasks)
    return tasks


def train_seeds(tasks: Sequence[PlannedRun], home: Path, parallel: int) -> int:
    """Trains what is not finished, prints the scores of what is, and writes them into `home`; returns the exit code."""

    def table() -> str:
        scores, lines = read_scores(tasks), []
        if scores.tasks:
            write_atomic(home / SCORES, json.dumps(scores.json(), indent=2) + "\n")
            lines += [scores.text(), str(home / SCORES)]
        if missing := [str(task.seed) for task in tasks if task not in scores.tasks]:
            lines.append(f"Not finished: seed {', '.join(missing)}.")
        return "\n".join(lines)

    return runs.train_and_tell(lambda: runs.run_tasks(tasks, parallel), table)
