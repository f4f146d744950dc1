"""`matmix launch slurm`: a recipe as a Slurm job, or a sweep as an array of them."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matmix.launch.jobs import snapshot
from matmix.launch.jobs.records import Job, add_job, launch_home, note_url, run_folder
from matmix.launch.jobs.slurm import scheduler
from matmix.launch.jobs.slurm.options import SlurmOptions
from matmix.launch.jobs.slurm.script import directives, mounts, render
from matmix.launch.jobs.sweep import Point
from matmix.train.config import RunConfig
from matmix.train.recipe import load_config, write_config
from matmix.train.run.directory import RunDirectory

_SCRIPT = "job.sbatch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """What goes to Slurm, before anything is written."""

    home: Path  # folder with launch/ and logs/
    options: SlurmOptions
    command: tuple[str, ...]  # as typed

    @functools.cached_property
    def launch_id(self) -> str:
        """A name that no launch from `home` has."""
        return snapshot.new_launch_id(self.home)

    @property
    def folder(self) -> Path:
        return self.home / "launch" / self.launch_id

    def render(
        self, template: str, options: SlurmOptions, needed: Iterable[str | Path], lines: Sequence[str], **own: Any
    ) -> str:
        """The text of a batch script. needed: folders, seen in a container; lines: those of #SBATCH; own: values of
        this template, beside those that every template may use."""
        values = {
            "title": "matmix " + " ".join(shlex.join(self.command).split()),
            "directives": lines,
            "launch": self.folder,
            "setup": options.setup,
            "env": options.env,
            "python": options.container_python if options.container else sys.executable,
            "runtime": options.runtime,
            "container": options.container,
            "mounts": mounts(needed, options),
            "gpus": options.gpus,
        }
        return render(template, values | own, options.template)

    def write(self, scripts: Mapping[str, str]) -> None:
        """Writes HOME/launch/<id>/, the scripts last, and makes the folder of the logs."""
        snapshot.take_snapshot(self.folder)
        self.write_inputs()
        (self.home / "logs").mkdir(exist_ok=True)
        for name, text in scripts.items():
            (self.folder / name).write_text(text, encoding="utf-8")

    def write_inputs(self) -> None:
        """Writes what the scripts read."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch(Submission):
    """A run, or the runs of a sweep or comparison as an array, whose directories lie below `home`."""

    configs: tuple[RunConfig, ...]  # one, or one for each task of the array
    is_sweep: bool

    @property
    def runs(self) -> list[Path]:
        return [run_folder(self.home, config.run_dir) for config in self.configs] if self.is_sweep else [self.home]

    def scripts(self) -> dict[str, str]:
        """File name -> text of the batch script."""
        lines = directives(self.options, self.home, f"0-{len(self.configs) - 1}" if self.is_sweep else "")
        data = (path for config in self.configs for path in (config.data.path, config.data.validation_path))
        text = self.render(
            "train.sbatch",
            self.options,
            [self.home, *data],
            lines,
            run=self.runs[0],
            runs=self.runs if self.is_sweep else [],
            master_addr=self.options.master_addr,
            tasks_per_node=self.options.ranks_per_node,
            max_requeues=self.options.max_requeues,
        )
        return {_SCRIPT: text}

    def write_inputs(self) -> None:
        """Writes the configs."""
        write_config(self.configs[0], self.folder / "config.toml")
        for number, (run, config) in enumerate(zip(self.runs, self.configs, strict=True)):
            note_url(run, config.run_dir)
            if self.is_sweep:
                task = self.folder / "tasks" / str(number)
                task.mkdir(parents=True)
                write_config(config, task / "config.toml")

    def submit(self, scripts: Mapping[str, str]) -> Job:
        """Writes and submits; the job as recorded in jobs.jsonl. Raises SlurmError or ValueError if Slurm refuses."""
        self.write(scripts)
        tasks = len(self.configs) if self.is_sweep else 0
        job = Job(kind="slurm", launch=self.launch_id, command=list(self.command), tasks=tasks)
        return submit_script(self.home, job, _SCRIPT)


def plan_launch(
    recipe: str, overrides: Sequence[str], points: Sequence[Point], options: SlurmOptions, command: Sequence[str]
) -> Launch:
    """Checks everything that can be checked before the job runs; writes nothing.

    Raises FileNotFoundError for a missing recipe and ValueError (one line) for settings that cannot work: a global
    batch that does not divide over the ranks, a run directory that belongs to another config.
    """
    base = load_config(recipe, overrides)
    home = launch_home(base.run_dir)
    if points and (home / "config.toml").is_file():
        raise ValueError(f"{home} is a run; give the sweep a --run-dir of its own, which will hold its runs")
    configs = []
    for point in points:
        swept = load_config(recipe, [*overrides, *point.overrides])
        configs.append(dataclasses.replace(swept, run_dir=f"{base.run_dir.rstrip('/')}/{point.name}"))
    return plan_configs(home, configs or [base], options, command, is_sweep=bool(points))


def plan_configs(
    home: Path, configs: Sequence[RunConfig], options: SlurmOptions, command: Sequence[str], *, is_sweep: bool
) -> Launch:
    """`plan_launch` of configs that are complete: one run, or the tasks of an array, whose run directories lie below
    `home`."""
    whole = tuple(checked(config, options.nodes * options.ranks_per_node) for config in configs)
    return Launch(home=home, options=options, command=tuple(command), configs=whole, is_sweep=is_sweep)


def checked(config: RunConfig, ranks: int) -> RunConfig:
    """The config with an absolute run directory.

    Raises ValueError for a global batch that does not divide over the ranks, and for a run directory that belongs to
    another config, as the run itself would.
    """
    config.micro_batch(ranks)
    if "://" in config.run_dir:
        return config
    config = dataclasses.replace(config, run_dir=str(launch_home(config.run_dir)))
    run = RunDirectory(config.run_dir)
    if (Path(config.run_dir) / "config.toml").is_file():
        # Where it is 0, the run has taken it from its data.
        vocab_size = config.model.vocab_size or run.read_config().model.vocab_size
        run.check(dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size)))
    return config


def submit_script(home: Path, job: Job, script: str, *options: str) -> Job:
    """Submits a script of the job's launch; the job with its new number, as recorded in jobs.jsonl. Raises SlurmError
    or ValueError if Slurm refuses."""
    number, cluster = scheduler.submit(str(home / "launch" / job.launch / script), *options)
    submitted = dataclasses.replace(job, job=number, cluster=cluster, time=time.time())
    add_job(home, submitted)
    return submitted
