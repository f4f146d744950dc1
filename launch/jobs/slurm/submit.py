"""`matmix launch slurm`: a recipe as a Slurm job, or a sweep as an array of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from matmix.launch.jobs import snapshot
from matmix.launch.jobs.records import Job, add_job, launch_home, note_url, run_folder
from matmix.launch.jobs.slurm import scheduler
from matmix.launch.jobs.slurm.options import SlurmOptions
from matmix.launch.jobs.slurm.script import directives, job_values, render
from matmix.launch.jobs.sweep import Point
from matmix.train.config import RunConfig
from matmix.train.recipe import load_config, write_config
from matmix.train.run.directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A launch before anything is written: what would run, and where."""

    home: Path  # RUN, or the directory of a sweep or comparison that holds its runs
    launch_id: str
    configs: tuple[RunConfig, ...]  # one, or one for each task of the array
    is_sweep: bool
    options: SlurmOptions
    command: tuple[str, ...]  # as typed

    @property
    def folder(self) -> Path:
        return self.home / "launch" / self.launch_id

    @property
    def runs(self) -> list[Path]:
        if not self.is_sweep:
            return [self.home]
        return [run_folder(self.home, config.run_dir) for config in self.configs]


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
    if not points:
        return plan_configs(home, [base], options, command, is_sweep=False)
    configs = []
    for point in points:
        config = load_config(recipe, [*overrides, *point.overrides])
        configs.append(dataclasses.replace(config, run_dir=f"{base.run_dir.rstrip('/')}/{point.name}"))
    return plan_configs(home, configs, options, command, is_sweep=True)


def plan_configs(
    home: Path, configs: Sequence[RunConfig], options: SlurmOptions, command: Sequence[str], *, is_sweep: bool
) -> Launch:
    """`plan_launch` of configs that are complete: one run, or the tasks of an array, whose run directories lie below
    `home`."""
    checked = [absolute(config) for config in configs]
    for config in checked:
        config.micro_batch(options.nodes * options.ranks_per_node)
        check_run_directory(config)
    return Launch(
        home=home,
        launch_id=snapshot.new_launch_id(home),
        configs=tuple(checked),
        is_sweep=is_sweep,
        options=options,
        command=tuple(command),
    )


def absolute(config: RunConfig) -> RunConfig:
    """The config with an absolute run directory."""
    if "://" in config.run_dir:
        return config
    return dataclasses.replace(config, run_dir=str(launch_home(config.run_dir)))


def check_run_directory(config: RunConfig) -> None:
    """As the run itself will do, but now. Raises ValueError."""
    if "://" in config.run_dir or not (Path(config.run_dir) / "config.toml").is_file():
        return
    run = RunDirectory(config.run_dir)
    if config.model.vocab_size == 0:  # the run has taken it from its data
        model = dataclasses.replace(config.model, vocab_size=run.read_config().model.vocab_size)
        config = dataclasses.replace(config, model=model)
    run.check(config)


def render_launch(launch: Launch) -> str:
    """The batch script."""
    options = launch.options
    lines = directives(
        options,
        name=launch.home.name,
        ranks_per_node=options.ranks_per_node,
        array=f"0-{len(launch.configs) - 1}" if launch.is_sweep else "",
        logs=launch.home / "logs",
    )
    data = (path for config in launch.configs for path in (config.data.path, config.data.validation_path))
    values = job_values(options, launch.command, launch.folder, lines, needed=[launch.home, *data]) | {
        "run": launch.runs[0],
        "runs": launch.runs if launch.is_sweep else [],
        "gpus": options.gpus,
        "master_addr": options.master_addr,
        "tasks_per_node": options.ranks_per_node,
        "max_requeues": options.max_requeues,
    }
    return render("train.sbatch", values, options.template)


def write_launch(launch: Launch, script: str) -> Path:
    """Writes RUN/launch/<id>/ (job.sbatch last) and the folders that the job writes to; the script's path."""
    snapshot.take_snapshot(launch.folder)
    write_config(launch.configs[0], launch.folder / "config.toml")
    if launch.is_sweep:
        for number, config in enumerate(launch.configs):
            task = launch.folder / "tasks" / str(number)
            task.mkdir(parents=True)
            write_config(config, task / "config.toml")
    for run, config in zip(launch.runs, launch.configs, strict=True):
        note_url(run, config.run_dir)
    (launch.home / "logs").mkdir(exist_ok=True)
    path = launch.folder / "job.sbatch"
    path.write_text(script, encoding="utf-8")
    return path


def submit_launch(launch: Launch, script: str) -> Job:
    """Writes and submits; the job as recorded in jobs.jsonl. Raises SlurmError or ValueError if Slurm refuses."""
    path = write_launch(launch, script)
    tasks = len(launch.configs) if launch.is_sweep else 0
    job = Job(kind="slurm", launch=launch.launch_id, command=list(launch.command), tasks=tasks)
    return submit_script(launch.home, job, path.name)


def submit_script(home: Path, job: Job, script: str, *options: str) -> Job:
    """Submits a script of the job's launch; the job with its new number, as recorded in jobs.jsonl. Raises SlurmError
    or ValueError if Slurm refuses."""
    number, cluster = scheduler.submit(str(home / "launch" / job.launch / script), *options)
    submitted = dataclasses.replace(job, job=number, cluster=cluster, time=time.time())
    add_job(home, submitted)
    return submitted
