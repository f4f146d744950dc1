"""The runs of `matmix glue`: the files that are there, each task with each seed, and what it begins with.

OUT/MNLI/seed-0               an ordinary run directory; those of the other tasks likewise
OUT/RTE/seed-0                one that begins with the weights of OUT/MNLI/seed-0; so do MRPC and STS-B
OUT/RTE-without-MNLI/seed-0   the same from the source itself, where there is no run on MNLI
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from matmix.data.artifacts import shell_line
from matmix.data.config import ExamplesConfig
from matmix.data.examples.base import Classes, read_number
from matmix.data.examples.readers import read_rows
from matmix.launch.glue import Column
from matmix.launch.glue.tasks import TASKS, GlueTask, overrides
from matmix.launch.many.planned import PlannedRun
from matmix.launch.many.scores import markdown
from matmix.train.config import InitConfig, RunConfig
from matmix.train.run.directory import RunDirectory
from matmix.use.finetuning import counted, finetuning_config

_OF_MICROSOFT = "msr_paraphrase_train.txt"


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """Counts the rows of a file."""

    examples: int
    left_out: int
    """Malformed ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The files of a task."""

    task: GlueTask
    folder: Path
    counts: Mapping[str, Count]
    """By the names of the files that can be read."""
    problems: Sequence[str]
    """What is missing or cannot be read, and what to do: a sentence each."""

    @property
    def begun(self) -> bool:
        """Returns True where the task has a folder."""
        return self.folder.is_dir()

    def words(self) -> str:
        """In one line for the files, and one for each problem."""
        files = [
            f"{name} {count.examples:,}" + (f" ({count.left_out:,} malformed left out)" if count.left_out else "")
            for name, count in self.counts.items()
        ]
        lines = [f"{self.task.name:<6}{', '.join(files)} examples"] if files else []
        return "\n".join([*lines, *(f"{self.task.name:<6}MISSING: {problem}" for problem in self.problems)])


def look(folder: Path, tasks: Sequence[GlueTask] = tuple(TASKS.values())) -> list[Found]:
    """Reads the files of these tasks. Raises FileNotFoundError (one line) where there is no `folder`."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: give the one that holds CoLA, MNLI and the others")
    return [_look(folder / task.name, task) for task in tasks]


def whole(folder: Path, tasks: Sequence[GlueTask] = ()) -> list[Found]:
    """The files of these tasks, or of all that `folder` has. Raises FileNotFoundError or ValueError (one line) where
    some are missing or cannot be read."""
    found = look(folder, tasks or list(TASKS.values()))
    if not tasks:
        found = [task for task in found if task.begun]
    problems = [problem for task in found for problem in task.problems]
    if problems or not found:
        what = problems[0] if problems else f"{folder} has none of the folders {', '.join(TASKS)}"
        raise ValueError(f"{what} ({shell_line('matmix', 'glue', '--check', folder)} lists all that is missing)")
    return found


def notes_on(found: Sequence[Found]) -> list[str]:
    """Returns the words of a table about its files."""
    left_out = [
        f"{count.left_out:,} rows of {task.task.name}/{name}"
        for task in found
        for name, count in task.counts.items()
        if count.left_out
    ]
    return [f"Left out as malformed: {', '.join(left_out)}."] if left_out else []


def _look(folder: Path, task: GlueTask) -> Found:
    if not folder.is_dir():
        return Found(task, folder, {}, [f"there is no folder {folder}; unpack {task.name} of the GLUE download there"])
    form, counts, problems = task.form(), {}, []
    if missing := [name for name in task.files if not (folder / name).is_file()]:
        problems.append(f"{folder} lacks {', '.join(missing)}; {_advice(folder, task)}")
    for name in task.files:
        if name not in missing:
            try:
                counts[name] = _count(folder / name, form)
            except ValueError as error:
                problems.append(str(error))
    return Found(task, folder, counts, problems)


def _count(path: Path, form: ExamplesConfig) -> Count:
    """Raises ValueError (one line) for what a run would stumble over."""
    rows = read_rows(str(path), form, tuple(form.columns))
    classes = Classes(form.labels)
    for number, value in enumerate(rows.columns["label"]):
        if form.labels:
            classes.number(value, partial(rows.where, number))
        else:
            read_number(value, rows.where(number))
    return Count(len(rows), rows.left_out)


def _advice(folder: Path, task: GlueTask) -> str:
    if task.name == "MRPC" and (folder / _OF_MICROSOFT).is_file():
        return (
            f"they are made of {_OF_MICROSOFT}, which is there: the rows whose two ids stand in GLUE's dev_ids.tsv are "
            "dev.tsv, the others are train.tsv, each with the first line; the download script of GLUE does that"
        )
    return f"copy them from the folder {task.name} of the GLUE download"


_MNLI = TASKS["MNLI"].name
_ALONE = "-without-MNLI"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GlueRun(PlannedRun):
    """One of the runs; `entry` is the name of the task, with that of the model where several are fine-tuned."""

    task: GlueTask
    examples: ExamplesConfig
    """Where its examples and tokens are now; a run that was moved knows where they were."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Says what is fine-tuned, on what, and how."""

    source: str
    name: str
    """What the table calls the source."""
    folder: Path
    """Of the public GLUE download."""
    out: Path
    tasks: Sequence[GlueTask]
    seeds: Sequence[int]
    settings: Column = "hydra"
    others: Sequence[str] = ()
    """Options of recipes that the command line gives to all tasks."""
    model: str = ""
    """What messages call the source, where other models are fine-tuned beside it."""

    def config(self, task: GlueTask) -> RunConfig:
        """That of a task's runs, with the steps of its epochs, but for what differs between seeds.

        Raises FileNotFoundError or ValueError (one line) for a source, examples or options that cannot be used.
        """
        words = [*task.overrides(self.folder), *overrides(self.settings, task.name, self.others)]
        return counted(finetuning_config(self.source, task.recipe, words))

    def runs(self) -> list[GlueRun]:
        """All runs, seed by seed. Raises as `config`."""
        configs = {task.name: self.config(task) for task in self.tasks}
        return [
            GlueRun(
                entry=f"{self.model} on {task.name}" if self.model else task.name,
                seed=seed,
                config=self._of_seed(task, configs[task.name], seed),
                task=task,
                examples=configs[task.name].data.examples,
            )
            for seed in self.seeds
            for task in self.tasks
        ]

    def mnli(self, seed: int) -> Path:
        """Where the run on MNLI with a seed lies."""
        return self.out / _MNLI / f"seed-{seed}"

    def _of_seed(self, task: GlueTask, config: RunConfig, seed: int) -> RunConfig:
        """`config` as a run of one seed, in its folder, with what it begins with."""
        folder, init = task.name, config.init
        if task.from_mnli and (TASKS[_MNLI] in self.tasks or self._has_mnli(seed)):
            # The same model but for its classifier, which knows other classes.
            init = InitConfig(from_=str(self.mnli(seed)), ignore=("classifier.*",))
        elif task.from_mnli:
            folder += _ALONE
        return dataclasses.replace(config, seed=seed, run_dir=str(self.out / folder / f"seed-{seed}"), init=init)

    def _has_mnli(self, seed: int) -> bool:
        """Returns True where the source has been trained on MNLI with a seed before."""
        run = RunDirectory(self.mnli(seed))
        return run.read_summary() is not None and run.read_config().init.from_ == self.source


def check_options(words: Sequence[str], instead: Mapping[str, str]) -> None:
    """Raises ValueError (one line) for options of recipes that differ between the runs; instead: what says them."""
    for word in words:
        if ours := instead.get(word.partition("=")[0].replace("_", "-")):
            raise ValueError(f"{word} differs between the runs: give {ours}")


def run_in(out: Path, task: GlueTask, seed: int) -> GlueRun | None:
    """The run of a task with a seed as it lies in `out`, whatever its settings; None where there is none. One that
    began with the weights of a run on MNLI comes before one that did not."""
    for folder in (task.name, f"{task.name}{_ALONE}"):
        run = RunDirectory(out / folder / f"seed-{seed}")
        try:
            config = dataclasses.replace(run.read_config(), run_dir=str(run.path))
        except (FileNotFoundError, ValueError):
            continue
        return GlueRun(entry=task.name, seed=seed, config=config, task=task, examples=config.data.examples)
    return None


def begins_alone(run: GlueRun) -> bool:
    """Returns True where the run lacks the weights of a run on MNLI which its task begins with as published."""
    return run.run.path.parent.name.endswith(_ALONE)


def plan_text(plan: Plan, found: Sequence[Found], runs: Sequence[GlueRun]) -> str:
    """Returns lines that tell what would be trained."""
    columns = ["task", "train", "validation", "lr", "weight decay", "epochs", "batch", "steps", "begins with"]
    rows = []
    for files in found:
        task = files.task
        config = next(run.config for run in runs if run.task == task)
        examples = [f"{files.counts[name].examples:,}" for name in ("train.tsv", task.validation)]
        rates = [f"{config.optimizer.lr:g}", f"{config.optimizer.weight_decay:g}", f"{config.epochs:g}"]
        start = "source" if config.init.from_ == plan.source else "MNLI"
        rows.append([task.name, *examples, *rates, str(config.global_batch_size), f"{config.steps:,}", start])
    seeds = ", ".join(map(str, plan.seeds))
    return f"{markdown(columns, rows)}\n\nSeeds: {seeds}. Runs: {len(runs)}, in {plan.out}."
