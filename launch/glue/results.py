"""Trains the runs of `matmix glue` and reads their scores: OUT/table.md, OUT/table.csv, OUT/glue.json."""

from __future__ import annotations

import collections
import csv
import dataclasses
import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from matmix.data.artifacts import read_json
from matmix.data.examples.base import name_of
from matmix.data.modalities.examples import open_examples
from matmix.data.storage.files import write_atomic
from matmix.launch.glue.plan import GlueRun, Plan
from matmix.launch.glue.tasks import TASKS, GlueTask
from matmix.launch.many.planned import other_settings
from matmix.launch.many.runs import Ended, run_tasks
from matmix.launch.many.scores import markdown, mean_in_words, spread
from matmix.train.config import RunConfig
from matmix.train.process import stop
from matmix.train.run.directory import RunDirectory
from matmix.train.tasks.base import Predicted
from matmix.train.tasks.finetuning.base import ExampleTask
from matmix.use.opening import open_model
from matmix.use.scoring import score_examples


def most_frequent(config: RunConfig, file: str) -> dict[str, float]:
    """The metrics of a run's task for the most frequent class of its training examples, or for one and the same value,
    as the answer to all examples in `file`. A correlation, which there is none, counts as 0."""
    task = config.task()
    assert isinstance(task, ExampleTask)
    options = dataclasses.replace(config.data.examples, validation=file)
    examples = open_examples(task.examples, dataclasses.replace(config.data, examples=options), "validation")
    numbers = np.arange(len(examples))
    labels = np.concatenate([examples.label(number) for number in numbers])
    values = np.zeros((len(examples), config.model.head.count))
    if examples.classes.names:
        [(name, _)] = collections.Counter(map(name_of, examples.training_labels)).most_common(1)
        values[:, examples.classes.names.index(name)] = 1
    return task.scores(Predicted(numbers, values, labels), examples)


SECOND = "second.json"
"""In a run directory: the metrics on the task's second file."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunScores:
    """One run."""

    seed: int
    run_dir: str
    begins_with: str
    """The run or export whose weights it takes."""
    values: dict[str, float]
    """By the titles of the task's scores; {} where the run is not finished or not scored."""
    why: str = ""
    """Why there are none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskScores:
    """One task with all its seeds."""

    task: GlueTask
    runs: Sequence[RunScores]
    control: dict[str, float]
    """By the titles of the scores: those of the most frequent class."""

    @property
    def finished(self) -> list[RunScores]:
        return [run for run in self.runs if run.values]

    def values(self, title: str) -> list[float]:
        """A score of the finished runs, by seed."""
        return [run.values[title] for run in self.finished]

    @property
    def means(self) -> list[float]:
        """The mean over the scores of each finished run."""
        return [fmean(run.values.values()) for run in self.finished]

    @property
    def score(self) -> float | None:
        """The mean over scores and seeds."""
        return fmean(self.means) if self.finished else None

    @property
    def control_score(self) -> float:
        """That of the most frequent class."""
        return fmean(self.control.values())


def missing_tasks(results: Sequence[TaskScores]) -> list[str]:
    """Names of the tasks of GLUE that have no finished run."""
    there = {result.task.name for result in results if result.finished}
    return [name for name in TASKS if name not in there]


def average(results: Sequence[TaskScores]) -> float | None:
    """The mean over the eight tasks of the means over their scores and seeds; None where one has no finished run."""
    return None if missing_tasks(results) else fmean([result.score for result in results])


def control_average(results: Sequence[TaskScores]) -> float | None:
    """Returns the average, as `average` does, of the most frequent class."""
    return None if missing_tasks(results) else fmean([result.control_score for result in results])


def score_second(task: GlueTask, folder: Path, run: RunDirectory) -> None:
    """Scores a finished run on its task's second file in `folder`, and keeps the metrics beside the run's own.

    Raises FileNotFoundError or ValueError (one line).
    """
    scores = score_examples(open_model(run.path), str(folder / task.name / task.second))
    record = {**scores.metrics(), "file": task.second, "examples": len(scores.examples)}
    write_atomic(run.path / SECOND, json.dumps(record, indent=2) + "\n")


def needs_second(task: GlueTask, run: RunDirectory) -> bool:
    """Returns True where a finished run has yet to be scored on its task's second file."""
    return bool(task.second) and not (run.path / SECOND).is_file()


def collect(plan: Plan, runs: Sequence[GlueRun]) -> list[TaskScores]:
    """All tasks of `plan` with their runs as they stand, and the scores of the most frequent class."""
    found = []
    for task in plan.tasks:
        own = [run for run in runs if run.task == task]
        folder, config = plan.folder / task.name, own[0].config
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, examples=own[0].examples))
        second = most_frequent(config, str(folder / task.second)) if task.second else {}
        control = _values(task, most_frequent(config, str(folder / task.validation)), second)
        found.append(TaskScores(task=task, runs=[read_run(run) for run in own], control=control))
    return found


def read_run(run: GlueRun) -> RunScores:
    """A run as it stands. One with other settings has no numbers here."""
    task, why, values = run.task, other_settings(run), {}
    if not why and not run.is_finished():
        why = "not finished" if run.run.config_path.is_file() else "not begun"
    elif not why and needs_second(task, run.run):
        why = f"{task.second} is not scored: the same command without --report does that"
    elif not why:
        second = read_json(run.run.path / SECOND) if task.second else {}
        values = _values(task, run.run.read_summary()["validation"], second)
    begins_with = run.config.init.from_
    return RunScores(seed=run.seed, run_dir=run.config.run_dir, begins_with=begins_with, values=values, why=why)


def _values(task: GlueTask, validation: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """The scores of a task by their titles, from the metrics on its files."""
    return {score.title: float((second if score.second else validation)[score.metric]) for score in task.scores}


logger = logging.getLogger(__name__)


def train(parts: Sequence[tuple[Plan, Sequence[GlueRun]]], parallel: int) -> Ended:
    """Trains what is not finished of the runs of some plans, `parallel` runs at a time, and scores second files.
    Signals stop it as they stop `run_tasks`."""
    runs = [run for _, of_plan in parts for run in of_plan]
    mnli = {id(run): plan.mnli(run.seed) for plan, of_plan in parts for run in of_plan}
    waiting = [run for run in runs if run.config.init.from_ == str(mnli[id(run)])]
    ended = run_tasks([run for run in runs if run not in waiting], parallel)
    if not ended.stopped:
        ready = [run for run in waiting if RunDirectory(mnli[id(run)]).read_summary() is not None]
        for run in waiting:
            if run not in ready:
                logger.warning(f"{run.title}: not started, as MNLI with this seed is not finished")
        ended = ended.then(run_tasks(ready, parallel))
    for plan, of_plan in parts:
        for run in of_plan:
            if stop.received():
                return Ended(ended.failures, stopped=True)
            if run.is_finished() and needs_second(run.task, run.run):
                logger.info(f"{run.title}: scoring {run.task.second}")
                score_second(run.task, plan.folder, run.run)
    return ended


_CONTROL = "most frequent class"


def write_table(plan: Plan, results: Sequence[TaskScores], notes: Sequence[str]) -> str:
    """Writes the files; returns the text to be shown. A table that is there stays where no run is finished.

    notes: further lines for people.
    """
    text = table_text(plan, results, notes)
    files = [plan.out / name for name in ("table.md", "table.csv", "glue.json")]
    if not any(result.finished for result in results) and files[0].is_file():
        return f"{text}\n\nNo run of this table is finished: {plan.out} is left as it was."
    plan.out.mkdir(parents=True, exist_ok=True)
    for path, content in zip(files, (text + "\n", table_csv(plan, results), table_json(plan, results)), strict=True):
        write_atomic(path, content)
    return f"{text}\n\n{', '.join(map(str, files))}"


def table_text(plan: Plan, results: Sequence[TaskScores], notes: Sequence[str] = ()) -> str:
    """In Markdown, with what is to be known about its numbers."""
    rows = []
    for result in results:
        count = str(len(result.finished))
        for score in result.task.scores:
            own = _words(result.values(score.title))
            rows.append([result.task.name, score.title, own, _words([result.control[score.title]]), count])
        if len(result.task.scores) > 1:
            rows.append([result.task.name, "mean", _words(result.means), _words([result.control_score]), count])
    missing = missing_tasks(results)
    averages = [_words([] if value is None else [value]) for value in (average(results), control_average(results))]
    rows.append(["average", "", *averages, ""])
    columns = ["task", "score (x 100)", plan.name, _CONTROL, "runs"]
    lines = [markdown(columns, rows), ""]
    lines.append("Mean ± sample standard deviation over seeds; the last evaluation of a run counts.")
    if missing:
        lines.append(f"No average, which is over all eight tasks: there is no finished run of {', '.join(missing)}.")
    else:
        lines.append("Average: the mean over tasks of the mean over their scores and seeds.")
    return "\n".join([*lines, *_about_runs(plan, results), *notes])


def table_csv(plan: Plan, results: Sequence[TaskScores]) -> str:
    """The same unrounded, as shares of 1, with each seed's own values."""
    text = io.StringIO()
    own = [f"seed_{seed}" for seed in plan.seeds]
    writer = csv.DictWriter(
        text, ["task", "score", "mean", "deviation", "runs", "most_frequent_class", *own], lineterminator="\n"
    )
    writer.writeheader()
    for result in results:
        for score in result.task.scores:
            found = spread(result.values(score.title))
            mean, deviation = (found.mean, found.deviation) if found else (None, None)
            row = {"task": result.task.name, "score": score.title, "mean": mean, "deviation": deviation}
            row |= {"runs": len(result.finished), "most_frequent_class": result.control[score.title]}
            writer.writerow(row | {f"seed_{run.seed}": run.values[score.title] for run in result.finished})
    return text.getvalue()


def table_json(plan: Plan, results: Sequence[TaskScores]) -> str:
    """All that the table says, and where it is from."""
    tasks = {}
    for result in results:
        runs = [
            {"seed": run.seed, "run": run.run_dir, "begins_with": run.begins_with, "scores": run.values}
            for run in result.runs
        ]
        tasks[result.task.name] = {"score": result.score, "most_frequent_class": result.control, "runs": runs}
    record = {"source": plan.source, "settings": plan.settings, "other_settings": list(plan.others)}
    record |= {"seeds": list(plan.seeds), "tasks": tasks, "missing": missing_tasks(results)}
    record |= {"average": average(results), "most_frequent_class": control_average(results)}
    return json.dumps(record, indent=2) + "\n"


def _about_runs(plan: Plan, results: Sequence[TaskScores]) -> list[str]:
    lines = [f"Settings: {plan.settings}" + (f", and {' '.join(plan.others)}." if plan.others else ".")]
    runs = [(result.task, run) for result in results for run in result.runs]
    alone = {task.name: None for task, run in runs if task.from_mnli and run.values and run.begins_with == plan.source}
    if alone:
        lines.append(f"{', '.join(alone)}: begins with {plan.source} itself, as it has no run on MNLI here.")
    if open_runs := [f"{task.name} seed {run.seed} ({run.why})" for task, run in runs if not run.values]:
        lines.append(f"Without a number: {', '.join(open_runs)}.")
    return lines


def _words(values: Sequence[float]) -> str:
    return mean_in_words(values, 1, scale=100)
