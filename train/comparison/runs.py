"""The runs of a comparison: each entry with each seed, as processes of their own, some at a time.

COMPARISON/<entry>/seed-0.toml        what the process is given
COMPARISON/<entry>/seed-0/            an ordinary run directory, and in it
COMPARISON/<entry>/seed-0/train.log   what the process printed
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from matmix.train import stop
from matmix.train.comparison.config import Comparison
from matmix.train.config import RunConfig
from matmix.train.exits import EXIT_STOPPED
from matmix.train.recipe import write_config
from matmix.train.run import RunDirectory

Tell = Callable[[str], None]
_LOOK_SECONDS = 0.2
_SHOWN_LINES = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One run."""

    entry: str
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
        """Its own word on it, or the last line it printed."""
        errors = [line for line in self.lines if line.startswith("matmix: error: ")]
        words = (errors or self.lines or [""])[-1].removeprefix("matmix: error: ")
        return words or f"ended with exit code {self.code} and without a word"


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How the runs ended."""

    failures: list[Failure]
    stopped: bool
    """A signal came; the runs that were going on have been saved."""


def tasks_of(comparison: Comparison) -> list[Task]:
    """All runs, seed by seed, so that every entry has a first result early."""
    return [
        Task(
            entry=entry.name,
            seed=seed,
            config=dataclasses.replace(
                entry.config, seed=seed, run_dir=str(comparison.home / entry.folder / f"seed-{seed}")
            ),
        )
        for seed in comparison.settings.seeds
        for entry in comparison.entries
    ]


def check_directories(tasks: Sequence[Task]) -> None:
    """Raises ValueError where a directory holds a run of another config, before anything is trained."""
    for task in tasks:
        try:
            task.run.check(task.config)
        except ValueError as error:
            raise ValueError(f"{task.title}: {error}") from None


def run_tasks(tasks: Sequence[Task], parallel: int, tell: Tell = print) -> Ended:
    """Trains what is not finished, `parallel` runs at a time; a failure does not keep the others from running.

    SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 go on to the runs, which save and end; a second Ctrl-C ends them at once.
    """
    waiting = [task for task in tasks if not task.is_finished()]
    if len(waiting) < len(tasks):
        tell(f"{len(tasks) - len(waiting)} of {len(tasks)} runs are finished already")
    running: list[_Process] = []
    failures: list[Failure] = []
    clock = _Clock(parallel)
    with stop.during_run():
        try:
            while waiting or running:
                while waiting and len(running) < parallel and not stop.received():
                    place = min(set(range(parallel)) - {process.place for process in running})
                    running.append(_Process(waiting.pop(0), place, parallel))
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
                        tell(_finished_line(process.task, process.seconds, left))
                    elif not (stop.received() and failure.code == EXIT_STOPPED):
                        failures.append(failure)
                        tell(f"{failure.task.title}: FAILED: {failure.reason}; {left} left")
                time.sleep(_LOOK_SECONDS if running else 0)
        finally:
            for process in running:  # something went wrong here, or Ctrl-C came twice
                process.kill()
        return Ended(failures, stopped=bool(stop.received()))


def describe_failures(failures: Sequence[Failure]) -> str:
    """What went wrong, run by run, with the last lines of each."""
    runs = "1 run" if len(failures) == 1 else f"{len(failures)} runs"
    lines = [f"{runs} failed; the same command tries again:"]
    for failure in failures:
        lines.append(f"  {failure.task.title}: {failure.reason} (exit code {failure.code}, {failure.task.log})")
        lines += [f"    | {line}" for line in failure.lines]
    return "\n".join(lines)


def process_environment(threads: int, device: str = "") -> dict[str, str]:
    """The environment of a process that gets so many of the cores and, where there are GPUs, this one."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return {**environment, "CUDA_VISIBLE_DEVICES": device} if device else environment


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "matmix.train", str(recipe)],
            env=process_environment(max(1, cores() // parallel), _device(place)),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at a terminal reaches this process alone, which passes it on
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


class _Clock:
    """Guesses how long the rest will take: as long as the runs so far, on average."""

    def __init__(self, parallel: int) -> None:
        self.parallel, self.total, self.runs = parallel, 0.0, 0

    def count(self, seconds: float) -> None:
        self.total += seconds
        self.runs += 1

    def left(self, running: Sequence[float], waiting: int) -> str:
        mean = self.total / self.runs
        seconds = sum(max(0.0, mean - spent) for spent in running) + waiting * mean
        return duration(seconds / min(self.parallel, max(1, len(running) + waiting)))


def duration(seconds: float) -> str:
    """As a person says it: 45 s, 12 min, 3.5 h."""
    for size, unit, digits in ((3600, "h", 1), (60, "min", 0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


def _finished_line(task: Task, seconds: float, left: str) -> str:
    summary = task.run.read_summary()
    what = "stopped before its last step" if summary is None else f"loss {summary['validation']['loss']:.4f}"
    return f"{task.title}: {what}, {duration(seconds)}; about {left} left"


def _device(place: int) -> str:
    """The GPU, as CUDA_VISIBLE_DEVICES names it, of the run at this place; "" without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return names[place % len(names)] if names else ""
