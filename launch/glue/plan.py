"""The runs of `matmix glue`: each task with each seed, and what it begins with.

OUT/MNLI/seed-0               an ordinary run directory; those of the other tasks likewise
OUT/RTE/seed-0                one that begins with the weights of OUT/MNLI/seed-0; so do MRPC and STS-B
OUT/RTE-without-MNLI/seed-0   the same from the source itself, where there is no run on MNLI
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from matmix.data.config import ExamplesConfig
from matmix.launch.glue.check import Found
from matmix.launch.glue.settings import Column, overrides
from matmix.launch.glue.tasks import TASKS, GlueTask
from matmix.launch.many.table import markdown
from matmix.launch.many.task import Task
from matmix.train.config import InitConfig, RunConfig
from matmix.train.run.directory import RunDirectory
from matmix.use.finetuning import counted, finetuning_config

_MNLI = TASKS["MNLI"].name
_ALONE = "-without-MNLI"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GlueRun(Task):
    """One of the runs; `entry` is the name of the task, with that of the model where several are fine-tuned."""

    task: GlueTask
    examples: ExamplesConfig
    """Where its examples and tokens are now; a run that was moved knows where they were."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is fine-tuned, on what, and how."""

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
        """Whether the source has been trained on MNLI with a seed before."""
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
    """Whether the run lacks the weights of a run on MNLI which its task begins with as published."""
    return run.run.path.parent.name.endswith(_ALONE)


def plan_text(plan: Plan, found: Sequence[Found], runs: Sequence[GlueRun]) -> str:
    """What would be trained."""
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
