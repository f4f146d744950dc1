"""The runs of `matmix glue`: the files that are there, each task with each seed, and what it begins with.

OUT/MNLI/seed-0               an ordinary run directory; those of the other tasks likewise
OUT/RTE/seed-0                one that begins with the weights of OUT/MNLI/seed-0; so do MRPC and STS-B
OUT/RTE-without-MNLI/seed-0   the same from the source itself, where there is no run on MNLI
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

from matmix.data.artifacts import shell_line
from matmix.data.examples.base import Classes, read_number
from matmix.data.examples.readers import read_rows
from matmix.launch.glue import Column
from matmix.launch.glue.tasks import TASKS, GlueTask, named, overrides
from matmix.launch.many.planned import PlannedRun, config_at, of_seed
from matmix.launch.many.scores import markdown
from matmix.train.config import InitConfig, RunConfig
from matmix.train.run.directory import RunDirectory
from matmix.use.finetuning import counted, finetuning_config

_OF_MICROSOFT = "msr_paraphrase_train.txt"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GlueSettings:
    """Holds what is asked for."""

    folder: str = ""
    """Of the public GLUE download."""
    settings: Column = "hydra"
    tasks: tuple[str, ...] = ()
    """Their names; () = all that `folder` has."""
    seeds: tuple[int, ...] = ()
    options: tuple[str, ...] = ()
    """Options of recipes, for all tasks."""

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {' '.join(map(str, self.seeds))}: one of them is given twice")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"seeds are integers >= 0, got {min(self.seeds)}")

    def overrides(self, task: GlueTask) -> list[str]:
        return overrides(self.settings, task.name, self.options)

    def words(self) -> str:
        return f"Settings: {self.settings}" + (f", and {' '.join(self.options)}." if self.options else ".")


@dataclasses.dataclass(frozen=True, slots=True)
class TaskFiles:
    """The files of a task, and what is wrong with them."""

    task: GlueTask
    counts: Mapping[str, tuple[int, int]]
    """Examples in each file that can be read, by its name, and malformed rows that are left out."""
    problems: Sequence[str]
    """What is missing or cannot be read, and what to do: a sentence each."""

    def words(self) -> str:
        """Says in a line what the files hold, and in one each what is wrong."""
        files = [
            f"{name} {examples:,}" + (f" ({left_out:,} malformed left out)" if left_out else "")
            for name, (examples, left_out) in self.counts.items()
        ]
        lines = [f"{', '.join(files)} examples"] if files else []
        lines += [f"MISSING: {problem}" for problem in self.problems]
        return "\n".join(f"{self.task.name:<6}{line}" for line in lines)


def look(folder: Path, tasks: Sequence[GlueTask] = tuple(TASKS.values())) -> list[TaskFiles]:
    """Reads the files of these tasks. Raises FileNotFoundError (one line) where there is no `folder`."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: give the one that holds CoLA, MNLI and the others")
    return [_look(folder / task.name, task) for task in tasks]


def whole(folder: Path, tasks: Sequence[GlueTask] = ()) -> list[TaskFiles]:
    """Reads the files of these tasks, or all that `folder` has. Raises ValueError (one line) where any is wrong."""
    files = look(folder, tasks or [task for task in TASKS.values() if (folder / task.name).is_dir()])
    problems = [problem for one in files for problem in one.problems]
    if problems or not files:
        what = problems[0] if problems else f"{folder} has none of the folders {', '.join(TASKS)}"
        raise ValueError(f"{what} ({shell_line('matmix', 'glue', '--check', folder)} lists all that is missing)")
    return files


def notes_on(files: Sequence[TaskFiles]) -> list[str]:
    """Returns the words of a table about its files."""
    counts = {f"{one.task.name}/{name}": count for one in files for name, (_, count) in one.counts.items()}
    rows = [f"{count:,} rows of {name}" for name, count in counts.items() if count]
    return [f"Left out as malformed: {', '.join(rows)}."] if rows else []


def _look(folder: Path, task: GlueTask) -> TaskFiles:
    if not folder.is_dir():
        advice = f"there is no folder {folder}; unpack {task.name} of the GLUE download there"
        return TaskFiles(task, {}, [advice])
    form, counts, problems = task.form(), {}, []
    missing = [name for name in task.files if not (folder / name).is_file()]
    if missing:
        advice = f"copy them from the folder {task.name} of the GLUE download"
        if task.name == "MRPC" and (folder / _OF_MICROSOFT).is_file():
            advice = (
                f"they are made of {_OF_MICROSOFT}, which is there: the rows whose two ids stand in GLUE's dev_ids.tsv "
                "are dev.tsv, the others are train.tsv, each with the first line; the download script of GLUE does that"
            )
        problems.append(f"{folder} lacks {', '.join(missing)}; {advice}")
    classes = Classes(form.labels)
    for name in (name for name in task.files if name not in missing):
        try:
            rows = read_rows(str(folder / name), form, tuple(form.columns))
            for number, value in enumerate(rows.columns["label"]):  # a run would stumble over a wrong one
                if form.labels:
                    classes.number(value, partial(rows.where, number))
                else:
                    read_number(value, rows.where(number))
            counts[name] = len(rows), rows.left_out
        except ValueError as error:
            problems.append(str(error))
    return TaskFiles(task, counts, problems)


_MNLI = TASKS["MNLI"].name
_ALONE = "-without-MNLI"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GlueRun(PlannedRun):
    """One of the runs; `entry` is the name of the task, with that of the model where several are fine-tuned."""

    task: GlueTask

    @property
    def begins_alone(self) -> bool:
        """Returns True where it lacks the weights of a run on MNLI which its task begins with as published."""
        return self.run.path.parent.name.endswith(_ALONE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Says what is fine-tuned, on what, and how. `runs` raises FileNotFoundError or ValueError (one line) for a source,
    examples or options that cannot be used."""

    source: str
    name: str
    """What the table calls the source."""
    out: Path
    asked: GlueSettings
    """With the names of the tasks, and seeds."""
    notes: Sequence[str] = ()
    """Further lines below the table."""
    model: str = ""
    """What messages call the source, where other models are fine-tuned beside it."""
    may_be_moved: bool = False
    """A run that has begun keeps what it began with, also where that lies elsewhere now."""

    @property
    def tasks(self) -> list[GlueTask]:
        return named(self.asked.tasks)

    @cached_property
    def configs(self) -> dict[str, RunConfig]:
        """Makes the config of each task, with the steps of its epochs, but for what differs between seeds."""
        folder, asked = Path(self.asked.folder), self.asked
        words = {task: [*task.overrides(folder), *asked.overrides(task)] for task in self.tasks}
        return {task.name: counted(finetuning_config(self.source, task.recipe, own)) for task, own in words.items()}

    @cached_property
    def runs(self) -> list[GlueRun]:
        """Lists all runs, seed by seed."""
        return [self._run(task, seed) for seed in self.asked.seeds for task in self.tasks]

    def mnli(self, seed: int) -> RunDirectory:
        return RunDirectory(self.out / _MNLI / f"seed-{seed}")

    def _run(self, task: GlueTask, seed: int) -> GlueRun:
        config, folder, mnli = self.configs[task.name], self.out / task.name, self.mnli(seed)
        # Where MNLI is not among the tasks, the source may have been trained on it before.
        before = mnli.read_summary() is not None and mnli.read_config().init.from_ == self.source
        if task.from_mnli and (before or _MNLI in self.asked.tasks):
            # The same model but for its classifier, which knows other classes.
            config = dataclasses.replace(config, init=InitConfig(from_=str(mnli.path), ignore=("classifier.*",)))
        elif task.from_mnli:
            folder = self.out / f"{task.name}{_ALONE}"
        config = of_seed(config, seed, folder)
        config = as_begun(config) if self.may_be_moved else config
        entry = f"{self.model} on {task.name}" if self.model else task.name
        return GlueRun(entry=entry, seed=seed, config=config, task=task)


def as_begun(config: RunConfig) -> RunConfig:
    """Returns `config` with what its run read when it began, and never again: it may lie elsewhere now."""
    run = RunDirectory(config.run_dir)
    if not run.config_path.is_file():
        return config
    begun = run.read_config()
    examples = dataclasses.replace(config.data.examples, tokenizer=begun.data.examples.tokenizer)
    data = dataclasses.replace(config.data, examples=examples)
    return dataclasses.replace(config, init=dataclasses.replace(config.init, from_=begun.init.from_), data=data)


def check_options(words: Sequence[str], instead: Mapping[str, str]) -> None:
    """Raises ValueError (one line) for options of recipes that differ between the runs; instead: what says them."""
    for word in words:
        if ours := instead.get(word.partition("=")[0].replace("_", "-")):
            raise ValueError(f"{word} differs between the runs: give {ours}")


def run_in(out: Path, task: GlueTask, seed: int) -> GlueRun | None:
    """Returns the run of a task with a seed as it lies in `out`, rather one that began with the weights of MNLI."""
    for folder in (task.name, f"{task.name}{_ALONE}"):
        if (config := config_at(RunDirectory(out / folder / f"seed-{seed}"))) is not None:
            return GlueRun(entry=task.name, seed=seed, config=config, task=task)
    return None


def plan_text(plan: Plan, files: Sequence[TaskFiles]) -> str:
    """Returns lines that tell what would be trained."""
    headings = ["task", "train", "validation", "lr", "weight decay", "epochs", "batch", "steps", "begins with"]
    rows = []
    for run, one in zip(plan.runs, files, strict=False):  # those of the first seed
        config, counts = run.config, [f"{one.counts[name][0]:,}" for name in ("train.tsv", run.task.validation)]
        rates = [f"{config.optimizer.lr:g}", f"{config.optimizer.weight_decay:g}", f"{config.epochs:g}"]
        start = "source" if config.init.from_ == plan.source else "MNLI"
        rows.append([run.task.name, *counts, *rates, str(config.global_batch_size), f"{config.steps:,}", start])
    seeds = ", ".join(map(str, plan.asked.seeds))
    return f"{markdown(headings, rows)}\n\nSeeds: {seeds}. Runs: {len(plan.runs)}, in {plan.out}."
