"""The runs of a comparison: each entry with each seed, in each variant (COMPARISON/<entry>/<variant>/seed-0 and so on),
as processes of their own, some at a time.

COMPARISON/<entry>/seed-0.toml        what the process is given
COMPARISON/<entry>/seed-0/            an ordinary run directory, and in it
COMPARISON/<entry>/seed-0/train.log   what the process printed
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from matmix.launch.lab.compare import progress
from matmix.launch.lab.compare.config import Comparison
from matmix.launch.lab.compare.processes import gpu, start
from matmix.train.config import RunConfig
from matmix.train.loaders import make_loader
from matmix.train.process import stop
from matmix.train.process.exits import EXIT_STOPPED, EXIT_USER
from matmix.train.recipe import write_config
from matmix.train.run.directory import RunDirectory
from matmix.train.words import duration

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_SHOWN_LINES = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One run."""

    entry: str
    """The entry's title: its name and, with variants, that of the variant."""
    seed: int
    config: RunConfig

    @property
    def title(self) -> str:
        return f"{self.entry}, seed {self.seed}"

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.config.run_dir)

    @property
    def log(self) -> Path:
        return self.run.path / "train.log"

    def is_finished(self) -> bool:
        """Whether it has been trained to its last step and evaluated."""
        summary = self.run.read_summary()
        return summary is not None and summary["step"] == self.config.last_step


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended without its last step."""

    task: Task
    code: int
    lines: list[str]  # the last that it printed

    @property
    def reason(self) -> str:
        """The error that the run reported, or the last line that it printed."""
        errors = [line for line in self.lines if line.startswith("matmix: error: ")]
        words = (errors or self.lines or [""])[-1].removeprefix("matmix: error: ")
        return words or f"ended with exit code {self.code} and without a word"

    @property
    def is_busy(self) -> bool:
        """Whether another process holds the run, which is no failure of it."""
        return self.code == EXIT_USER and "is in use by another job (" in self.reason

    @property
    def words(self) -> str:
        """The failure in one line."""
        if not self.is_busy:
            return f"{self.task.title}: FAILED: {self.reason}"
        owner = self.task.run.lock().owner()
        return f"{self.task.title}: is being trained by process {owner.get('pid')} on {owner.get('host')}"


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """What `run_tasks` returns."""

    failures: list[Failure]
    stopped: bool
    """A signal came; the runs that were going on have been saved."""


def tasks_of(comparison: Comparison, only: Sequence[str] = ()) -> list[Task]:
    """All runs, seed by seed, so that every entry has a first result early.

    only: names of entries and of variants to which they are restricted. Raises ValueError for others.
    """
    entries = {entry.name for entry in comparison.entries}
    variants = {entry.variant for entry in comparison.entries}
    for name in only:
        if name not in entries | variants:
            known = sorted(entries | variants - {""})
            near = difflib.get_close_matches(name, known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else "known: " + ", ".join(f'"{name}"' for name in known)
            raise ValueError(f'--only: no entry and no variant is called "{name}" ({hint})')
    entries, variants = entries & set(only) or entries, variants & set(only) or variants
    return [
        Task(
            entry=entry.title,
            seed=seed,
            config=dataclasses.replace(
                entry.config, seed=seed, run_dir=str(comparison.home / entry.folder / f"seed-{seed}")
            ),
        )
        for seed in comparison.settings.seeds
        for entry in comparison.entries
        if entry.name in entries and entry.variant in variants
    ]


def check_data(tasks: Sequence[Task]) -> None:
    """Raises FileNotFoundError (one line) where no run that is not finished has its data: each would fail by itself."""
    missing = []
    for config in {repr(task.config.data): task.config for task in tasks if not task.is_finished()}.values():
        try:
            make_loader(config, "train", 0, 1).close()
        except FileNotFoundError as error:
            missing.append(error)
        else:
            return
    if missing:
        raise missing[0]


def run_tasks(tasks: Sequence[Task], parallel: int) -> Ended:
    """Trains what is not finished, `parallel` runs at a time; a failure does not keep the others from running.

    Within `listening` the signals SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 go on to the runs, which save and end; a
    second Ctrl-C ends them at once.
    """
    waiting = [task for task in tasks if not task.is_finished()]
    if len(waiting) < len(tasks):
        logger.info(f"{len(tasks) - len(waiting)} of {len(tasks)} runs are finished already")
    running: list[_Process] = []
    failures: list[Failure] = []
    clock = progress.Clock(parallel)
    told = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < parallel and not stop.received():
                place = min(set(range(parallel)) - {process.place for process in running})
                running.append(_Process(waiting.pop(0), place, parallel))
                logger.info(f"{running[-1].task.title}: started; what it prints: {running[-1].task.log}")
            if stop.received():
                waiting = []
                for process in running:
                    process.stop()
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                clock.count(process.seconds)
                left = clock.left([other.seconds for other in running], len(waiting))
                failure = process.close()
                if failure is None:
                    logger.info(_finished_line(process.task, process.seconds, left))
                elif not (stop.received() and failure.code == EXIT_STOPPED):
                    failures.append(failure)
                    logger.info(f"{failure.words}; about {left} left")
            if running and time.monotonic() - told >= progress.EVERY_SECONDS:
                told = time.monotonic()
                done = len(tasks) - len(waiting) - len(running) - len(failures)
                logger.info(_progress_line([process.task for process in running], done, len(tasks)))
            time.sleep(_LOOK_SECONDS if running else 0)
    finally:
        for process in running:  # something went wrong here, or Ctrl-C came twice
            process.kill()
    return Ended(failures, stopped=bool(stop.received()))


def describe_failures(failures: Sequence[Failure]) -> str:
    """What went wrong, run by run, with the last lines of each."""
    lines = [failure.words for failure in failures if failure.is_busy]
    if failed := [failure for failure in failures if not failure.is_busy]:
        runs = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
        lines.append(f"{runs} failed; the same command tries again:")
    for failure in failed:
        lines.append(f"  {failure.task.title}: {failure.reason} (exit code {failure.code}, {failure.task.log})")
        lines += [f"    | {line}" for line in failure.lines]
    return "\n".join(lines)


class _Process:
    """A run that is going on."""

    def __init__(self, task: Task, place: int, parallel: int) -> None:
        self.task, self.place = task, place
        recipe = task.run.path.with_suffix(".toml")
        task.run.path.mkdir(parents=True, exist_ok=True)
        write_config(task.config, recipe)
        self._output: BinaryIO = task.log.open("ab")
        self._begin = self._output.tell()
        self._began = time.monotonic()
        self._stopped = False
        self._process = start(
            *("matmix.train", recipe),
            parallel=parallel,
            device=gpu(place),
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """Asks it once to save and end."""
        if not self._stopped:
            self._stopped = True
            self._process.send_signal(stop.SIGNALS[0])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()

    def close(self) -> Failure | None:
        """How it failed, None if it did not."""
        self._output.close()
        code = self._process.returncode
        if code == 0:
            return None
        with self.task.log.open("rb") as file:
            file.seek(self._begin)
            text = file.read().decode("utf-8", "replace")
        lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
        return Failure(self.task, code, lines[-_SHOWN_LINES:])


def _progress_line(running: Sequence[Task], done: int, runs: int) -> str:
    words = [f"{task.title}: {progress.run_words(task.run.path, task.config.last_step)}" for task in running]
    return f"{' | '.join(words)} | {done} of {runs} runs done"


def _finished_line(task: Task, seconds: float, left: str) -> str:
    summary = task.run.read_summary()
    what = "stopped before its last step" if summary is None else f"loss {summary['validation']['loss']:.4f}"
    return f"{task.title}: {what}, {duration(seconds)}; about {left} left"
