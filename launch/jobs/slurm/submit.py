"""`matmix launch slurm`: a recipe as a Slurm job, or a sweep as an array of them."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import shell_line
from matmix.launch.jobs.launches import Job, add_job, launch_home, new_launch_id, note_url, run_folder, take_snapshot
from matmix.launch.jobs.slurm import scheduler
from matmix.launch.jobs.slurm.options import SlurmOptions
from matmix.launch.jobs.slurm.script import directives, mounts, render
from matmix.launch.jobs.sweep import Point
from matmix.train.config import RunConfig
from matmix.train.recipe import load_config, write_config
from matmix.train.run.directory import RunDirectory

SCRIPT = "job.sbatch"
# What templates may use of the options.
_OPTIONS = ("setup", "env", "runtime", "container", "gpus", "master_addr", "max_requeues")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """Holds all that goes to Slurm, before anything is written."""

    home: Path  # folder with launch/ and logs/
    job: Job  # without its number
    scripts: Mapping[str, str]  # file name -> text; each begins when the one before has succeeded
    write_inputs: Callable[[Path], object]  # writes what the scripts read into HOME/launch/<id>

    @property
    def folder(self) -> Path:
        return self.home / "launch" / self.job.launch

    def write(self) -> None:
        """Writes HOME/launch/<id>/, the scripts last, and makes the folder of the logs."""
        take_snapshot(self.folder)
        self.write_inputs(self.folder)
        (self.home / "logs").mkdir(exist_ok=True)
        for name, text in self.scripts.items():
            (self.folder / name).write_text(text, encoding="utf-8")

    def submit(self) -> Job:
        """Writes and submits; the last script's job as recorded in jobs.jsonl. Raises SlurmError or ValueError if Slurm
        refuses."""
        self.write()
        return submit_scripts(self.home, self.job, dict.fromkeys(self.scripts, ()))


def render_job(
    template: str, home: Path, job: Job, options: SlurmOptions, needed: Iterable[str | Path], array: str, **own: Any
) -> str:
    """The text of a batch script. needed: folders, seen in a container; array: as in 0-7, "" = no array; own: values of
    this template, beside those that every template may use."""
    values = {
        "title": " ".join(shell_line("matmix", *job.command).split()),
        "directives": directives(options, home, array),
        "launch": home / "launch" / job.launch,
        "python": options.container_python if options.container else sys.executable,
        "mounts": mounts(needed, options),
        **{name: getattr(options, name) for name in _OPTIONS},
    }
    return render(template, values | own, options.template)


def plan_launch(
    recipe: str, overrides: Sequence[str], points: Sequence[Point], options: SlurmOptions, command: Sequence[str]
) -> Submission:
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
) -> Submission:
    """`plan_launch` of configs that are complete: one run, or the tasks of an array, whose run directories lie below
    `home`."""
    configs = [checked(config, options.nodes * options.ranks_per_node) for config in configs]
    runs = [run_folder(home, config.run_dir) for config in configs] if is_sweep else []
    job = Job(kind="slurm", launch=new_launch_id(home), command=list(command), tasks=len(runs))
    datasets = [part for config in configs for part in (config.data, config.data.images)]
    needed = [home, *(path for part in datasets for path in (part.path, part.validation_path))]
    array = f"0-{len(runs) - 1}" if runs else ""
    own = {"run": home, "runs": runs, "tasks_per_node": options.ranks_per_node}
    script = render_job("train.sbatch", home, job, options, needed, array, **own)

    def write_configs(folder: Path) -> None:
        write_config(configs[0], folder / "config.toml")
        for number, (run, config) in enumerate(zip(runs or [home], configs, strict=True)):
            note_url(run, config.run_dir)
            if runs:
                task = folder / "tasks" / str(number)
                task.mkdir(parents=True)
                write_config(config, task / "config.toml")

    return Submission(home=home, job=job, scripts={SCRIPT: script}, write_inputs=write_configs)


def checked(config: RunConfig, ranks: int) -> RunConfig:
    """The config with an absolute run directory.

    Raises ValueError for a global batch that does not divide over the ranks, and for a run directory that belongs to
    another config, as the run itself would.
    """
    if words := config.micro_batch_words(config.data_size(ranks)):
        print(words, file=sys.stderr, flush=True)
    if "://" in config.run_dir:
        return config
    config = dataclasses.replace(config, run_dir=str(launch_home(config.run_dir)))
    run = RunDirectory(config.run_dir)
    if run.config_path.is_file():
        # Where it is 0, the run has taken it from its data.
        vocab_size = config.model.vocab_size or run.read_config().model.vocab_size
        run.check(dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size)))
    return config


def submit_scripts(home: Path, job: Job, scripts: Mapping[str, Sequence[str]]) -> Job:
    """Submits scripts of a job's launch, each with options, to begin when the one before has succeeded; the last one's
    job, as recorded in jobs.jsonl. Raises SlurmError or ValueError if Slurm refuses."""
    job = dataclasses.replace(job, job="", after="")
    for script, options in scripts.items():
        waits = [f"--dependency=afterok:{job.job}"] if job.job else []
        number, cluster = scheduler.submit(str(home / "launch" / job.launch / script), *options, *waits)
        job = dataclasses.replace(job, job=number, cluster=cluster, after=job.job, time=time.time())
        add_job(home, job)
    return job
