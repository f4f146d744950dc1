"""The scores of the runs of `matmix glue`, read from their directories; those on second files are computed once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matmix.data.artifacts import read_json
from matmix.data.storage.files import write_atomic
from matmix.launch.glue.control import most_frequent
from matmix.launch.glue.plan import GlueRun, Plan
from matmix.launch.glue.tasks import TASKS, GlueTask
from matmix.launch.many.settings import other_settings
from matmix.train.run.directory import RunDirectory
from matmix.use.opening import open_model
from matmix.use.scoring import score_examples

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
    """As `average`, of the most frequent class."""
    return None if missing_tasks(results) else fmean([result.control_score for result in results])


def score_second(task: GlueTask, folder: Path, run: RunDirectory) -> None:
    """Scores a finished run on its task's second file in `folder`, and keeps the metrics beside the run's own.

    Raises FileNotFoundError or ValueError (one line).
    """
    scores = score_examples(open_model(run.path), str(folder / task.name / task.second))
    record = {**scores.metrics(), "file": task.second, "examples": len(scores.examples)}
    write_atomic(run.path / SECOND, json.dumps(record, indent=2) + "\n")


def needs_second(task: GlueTask, run: RunDirectory) -> bool:
    """Whether a finished run has yet to be scored on its task's second file."""
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
