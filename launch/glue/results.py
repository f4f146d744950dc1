"""Trains the runs of `matmix glue` and reads their scores: OUT/table.md, OUT/table.csv, OUT/glue.json."""

import collections
import dataclasses
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
from matmix.launch.many import runs
from matmix.launch.many.planned import why_open
from matmix.launch.many.scores import ScoreColumn, csv_of, markdown, spread, write_tables
from matmix.train.config import RunConfig
from matmix.train.process import stop
from matmix.train.tasks.base import Predicted
from matmix.train.tasks.finetuning.base import ExampleTask
from matmix.use.opening import open_model
from matmix.use.scoring import score_examples

logger = logging.getLogger(__name__)

SECOND = "second.json"
"""In a run directory: the metrics on the task's second file."""
_CONTROL = "most frequent class"
_SHARE = ScoreColumn("score", "score (x 100)")


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
        return [run.values[title] for run in self.finished]

    @property
    def means(self) -> list[float]:
        """Returns the mean over the scores of each finished run."""
        return [fmean(run.values.values()) for run in self.finished]

    @property
    def score(self) -> float | None:
        return fmean(self.means) if self.finished else None

    @property
    def control_score(self) -> float:
        return fmean(self.control.values())


def missing_tasks(results: Sequence[TaskScores]) -> list[str]:
    """Names of the tasks of GLUE that have no finished run."""
    there = {result.task.name for result in results if result.finished}
    return [name for name in TASKS if name not in there]


def averages(results: Sequence[TaskScores]) -> tuple[float, float] | tuple[None, None]:
    """Returns the mean over the eight tasks of their scores, and that of the most frequent class; None where a task has
    no finished run."""
    if missing_tasks(results):
        return None, None
    return fmean([result.score for result in results]), fmean([result.control_score for result in results])


def collect(plan: Plan) -> list[TaskScores]:
    """Reads the runs of `plan` as they stand, and scores the most frequent class."""
    results = []
    for task in plan.tasks:
        folder, config = Path(plan.asked.folder) / task.name, plan.configs[task.name]
        second = most_frequent(config, str(folder / task.second)) if task.second else {}
        control = _values(task, most_frequent(config, str(folder / task.validation)), second)
        own = [read_run(run) for run in plan.runs if run.task == task]
        results.append(TaskScores(task=task, runs=own, control=control))
    return results


def most_frequent(config: RunConfig, file: str) -> dict[str, float]:
    """Scores the most frequent class of the training examples, or one and the same value, as the answer to all examples
    in `file`. A correlation, which there is none, counts as 0."""
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


def read_run(run: GlueRun) -> RunScores:
    """Reads a run as it stands. One with other settings has no numbers here."""
    task, why, values = run.task, why_open(run), {}
    if not why and _lacks_second(run):
        why = f"{task.second} is not scored: the same command without --report does that"
    elif not why:
        second = read_json(run.run.path / SECOND) if task.second else {}
        values = _values(task, run.run.read_summary()["validation"], second)
    begins_with = run.config.init.from_
    return RunScores(seed=run.seed, run_dir=run.config.run_dir, begins_with=begins_with, values=values, why=why)


def _lacks_second(run: GlueRun) -> bool:
    """Returns True where a finished run has yet to be scored on its task's second file."""
    return bool(run.task.second) and not (run.run.path / SECOND).is_file()


def _values(task: GlueTask, validation: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Returns the scores of a task by their titles, from the metrics on its files."""
    return {score.title: float((second if score.second else validation)[score.metric]) for score in task.scores}


def train(plans: Sequence[Plan], parallel: int) -> runs.Ended:
    """Trains the runs of some plans as `run_tasks` does, those on MNLI first, and scores second files."""
    every = [(plan, run, plan.mnli(run.seed)) for plan in plans for run in plan.runs]
    later = [(run, mnli) for _, run, mnli in every if run.config.init.from_ == str(mnli.path)]
    ended = runs.run_tasks([run for _, run, mnli in every if run.config.init.from_ != str(mnli.path)], parallel)
    if not ended.stopped:
        ready = [run for run, mnli in later if mnli.read_summary() is not None]
        for run, _ in later:
            if run not in ready:
                logger.warning(f"{run.title}: not started, as MNLI with this seed is not finished")
        ended = ended.then(runs.run_tasks(ready, parallel))
    for plan, run, _ in every:
        if stop.received():
            return runs.Ended(ended.failures, stopped=True)
        if _lacks_second(run) and run.is_finished():
            logger.info(f"{run.title}: scoring {run.task.second}")
            file = Path(plan.asked.folder) / run.task.name / run.task.second
            scores = score_examples(open_model(run.run.path), str(file))
            record = {**scores.metrics(), "file": run.task.second, "examples": len(scores.examples)}
            write_atomic(run.run.path / SECOND, json.dumps(record, indent=2) + "\n")
    return ended


def write_table(plan: Plan, results: Sequence[TaskScores]) -> str:
    """Writes the files; returns the text to be shown. A table that is there stays where no run is finished."""
    files = {"table.csv": table_csv(plan, results), "glue.json": table_json(plan, results)}
    is_empty = not any(result.finished for result in results)
    return write_tables(plan.out, table_text(plan, results), files, is_empty=is_empty)


def table_text(plan: Plan, results: Sequence[TaskScores]) -> str:
    """Writes the table in Markdown, with what is to be known about its numbers."""
    rows = []
    for result in results:
        scores = {title: (result.values(title), [control]) for title, control in result.control.items()}
        if len(scores) > 1:
            scores["mean"] = result.means, [result.control_score]
        for title, values in scores.items():
            rows.append([result.task.name, title, *map(_SHARE.words, values), str(len(result.finished))])
    rows.append(["average", "", *("" if value is None else _SHARE.words([value]) for value in averages(results)), ""])
    lines = [markdown(["task", _SHARE.heading, plan.name, _CONTROL, "runs"], rows), ""]
    lines.append("Mean ± sample standard deviation over seeds; the last evaluation of a run counts.")
    if missing := missing_tasks(results):
        lines.append(f"No average, which is over all eight tasks: there is no finished run of {', '.join(missing)}.")
    else:
        lines.append("Average: the mean over tasks of the mean over their scores and seeds.")
    lines.append(plan.asked.words())
    of_tasks = [(result.task, run) for result in results for run in result.runs]
    alone = [task for task, run in of_tasks if task.from_mnli and run.values and run.begins_with == plan.source]
    if names := dict.fromkeys(task.name for task in alone):
        lines.append(f"{', '.join(names)}: begins with {plan.source} itself, as it has no run on MNLI here.")
    if open_runs := [f"{task.name} seed {run.seed} ({run.why})" for task, run in of_tasks if not run.values]:
        lines.append(f"Without a number: {', '.join(open_runs)}.")
    return "\n".join([*lines, *plan.notes])


def table_csv(plan: Plan, results: Sequence[TaskScores]) -> str:
    """The same unrounded, as shares of 1, with each seed's own values."""
    rows = []
    for result in results:
        for title, control in result.control.items():
            over, by_seed = spread(result.values(title)), {run.seed: run.values[title] for run in result.finished}
            row = {"task": result.task.name, "score": title, "mean": over and over.mean}
            row |= {"deviation": over and over.deviation, "runs": len(by_seed), "most_frequent_class": control}
            rows.append(row | {f"seed_{seed}": by_seed.get(seed) for seed in plan.asked.seeds})
    return csv_of(rows)


def table_json(plan: Plan, results: Sequence[TaskScores]) -> str:
    """All that the table says, and where it is from."""
    tasks = {}
    for result in results:
        own = [
            {"seed": run.seed, "run": run.run_dir, "begins_with": run.begins_with, "scores": run.values}
            for run in result.runs
        ]
        tasks[result.task.name] = {"score": result.score, "most_frequent_class": result.control, "runs": own}
    asked = plan.asked
    record = {"source": plan.source, "settings": asked.settings, "other_settings": list(asked.options)}
    record |= {"seeds": list(asked.seeds), "tasks": tasks, "missing": missing_tasks(results)}
    record["average"], record["most_frequent_class"] = averages(results)
    return json.dumps(record, indent=2) + "\n"
