"""Trains runs side by side, some at a time: each as a process of its own, which is given RUN.toml and prints into
RUN/train.log."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from matmix.data.artifacts import read_json_lines
from matmix.data.processes import cores, threads_of_each
from matmix.launch.many.planned import PlannedRun
from matmix.train.process import launched, stop
from matmix.train.process.exits import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, EXIT_USER
from matmix.train.recipe import write_config
from matmix.train.run.directory import MovedError, Place
from matmix.train.tasks.base import words_on
from matmix.train.words import duration

logger = logging.getLogger(__name__)

EVERY_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_SHOWN_LINES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended without its last step."""

    task: PlannedRun
    code: int
    lines: list[str]  # the last that it printed

    @property
    def reason(self) -> str:
        """Returns the error that the run reported, or the last line that it printed."""
        errors = [line for line in self.lines if line.startswith("matmix: error: ")]
        words = (errors or self.lines or [""])[-1].removeprefix("matmix: error: ")
        return words or f"ended with exit code {self.code} and without a word"

    @property
    def is_busy(self) -> bool:
        """Returns True where another process holds the run, which is no failure of it."""
        return self.code == EXIT_USER and "is in use by another job (" in self.reason

    @property
    def words(self) -> str:
        return f"{self.task.title}: {'' if self.is_busy else 'FAILED: '}{self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How runs ended that were trained side by side."""

    failures: list[Failure]
    stopped: bool
    """A signal came; the runs that were going on have been saved."""

    def then(self, later: Ended) -> Ended:
        return Ended([*self.failures, *later.failures], self.stopped or later.stopped)

    @property
    def is_busy(self) -> bool:
        """Returns True where another process trains one of the runs."""
        return any(failure.is_busy for failure in self.failures)

    @property
    def code(self) -> int:
        """Returns the exit code of a command that trained them."""
        if not self.stopped and not all(failure.is_busy for failure in self.failures):
            return EXIT_FAILED
        return EXIT_STOPPED if self.stopped or self.is_busy else EXIT_OK

    def words_on_failures(self) -> str:
        """Returns lines that tell what went wrong, run by run, with the last lines of each; "" where nothing did."""
        lines = [failure.words for failure in self.failures if failure.is_busy]
        if failed := [failure for failure in self.failures if not failure.is_busy]:
            runs = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
            lines.append(f"{runs} failed; the same command tries again:")
        for failure in failed:
            lines.append(f"  {failure.task.title}: {failure.reason} (exit code {failure.code}, {failure.task.log})")
            lines += [f"    | {line}" for line in failure.lines]
        return "\n".join(lines)


def train_and_tell(train: Callable[[], Ended], table: Callable[[], str]) -> int:
    """Calls `train`, which signals stop, and prints the table and what went wrong; returns the exit code."""
    with listening():
        ended = train()
    if ended.stopped:
        say("Stopped; what was running is saved. The same command goes on from there.")
        return ended.code
    for text in (table(), ended.words_on_failures()):
        if text:
            say(f"\n{text}")
    return ended.code


def training_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of training steps in a metrics.jsonl, in order; [] where there is none."""
    return [record for record in read_json_lines(path) if record.get("kind") == "train"]


def say(text: str) -> None:
    """Prints, also to a terminal that was closed: what runs were trained is saved nevertheless."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def check_parallel(parallel: int) -> None:
    """Raises ValueError (one line) for a number of runs at a time that the cores are too few for."""
    if not 1 <= parallel <= cores():
        raise ValueError(f"--parallel must lie between 1 and the {cores()} cores here, got {parallel}")


def is_one_of_several() -> bool:
    """Returns True where a launcher such as torchrun has started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def begin_alone() -> int:
    """Begins a process of a command that is not for several ranks; returns the exit code, 0 = go on. One of several
    outlives the signal by which the launcher ends the others, so that rank 0 can say what is wrong."""
    if is_one_of_several():
        stop.listen()
    return 0


def check_alone(words: str) -> None:
    """Raises ValueError (one line) in one of several ranks; words: what starts processes of its own."""
    if is_one_of_several():
        raise ValueError(f"{words} starts a process for each run: do not start it on several ranks itself")


def threads(parallel: int = 1) -> int:
    """Threads of each of so many processes at a time: the user's OMP_NUM_THREADS, else a share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else threads_of_each(parallel)


def start(
    module: str, argument: Path, *, parallel: int = 1, place: int | None = None, **options: Any
) -> subprocess.Popen:
    """Starts `python -m module argument` in a session of its own: Ctrl-C at a terminal reaches this process alone,
    which passes it on. place: among `parallel` processes at a time, each of which has a GPU where there are some."""
    own = {"OMP_NUM_THREADS": str(threads(parallel)), launched.LAUNCHER_VARIABLE: str(os.getpid())}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    if place is not None and gpus:
        own["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    command = [sys.executable, "-P", "-m", module, str(argument)]
    environment = {**os.environ, **own}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **options)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Notes the signals that stop a run, and SIGHUP (a closed terminal) unless it is ignored, as under nohup."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.during_run())
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            before = signal.getsignal(signal.SIGHUP)
            if before is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, lambda number, _frame: stop.request(number))
                stack.callback(signal.signal, signal.SIGHUP, signal.SIG_DFL if before is None else before)
        yield


def run_tasks(tasks: Sequence[PlannedRun], parallel: int) -> Ended:
    """Trains what is not finished, `parallel` runs at a time; a failure does not keep the others from running. Within
    `listening` signals go on to the runs, which save and end; a second Ctrl-C ends them at once. Raises MovedError
    where the folder that they lie in is moved away meanwhile: what was running has saved and ended in it."""
    waiting = [task for task in tasks if not task.is_finished()]
    if len(waiting) < len(tasks):
        logger.info(f"{len(tasks) - len(waiting)} of {len(tasks)} runs are finished already")
    if not waiting:
        return Ended([], stopped=bool(stop.received()))
    running: list[_Process] = []
    failures: list[Failure] = []
    took: list[float] = []
    told = time.monotonic()
    home = Place(Path(os.path.commonpath([task.run.path.parent.absolute() for task in tasks])))
    home.given.mkdir(parents=True, exist_ok=True)
    home.hold()
    try:
        while waiting or running:
            moved = home.moved()
            if moved is not None or stop.received():
                waiting = []
                for process in running:
                    process.stop()
            if moved is not None:
                for process in running:
                    process.popen.wait()
                saved = "what was running is saved there"
                raise MovedError(f"{home.given} {moved.words} while runs went on in it; {saved}")
            while waiting and len(running) < parallel:
                place = min(set(range(parallel)) - {process.place for process in running})
                running.append(_Process(waiting.pop(0), place, parallel))
                logger.info(f"{running[-1].task.title}: started; what it prints: {running[-1].task.log}")
            for process in [process for process in running if process.popen.poll() is not None]:
                running.remove(process)
                took.append(process.seconds)
                left = time_left(took, [other.seconds for other in running], len(waiting), parallel)
                failure = process.failure()
                if failure is None:
                    logger.info(_finished_line(process.task, process.seconds, left))
                elif not (stop.received() and failure.code == EXIT_STOPPED):
                    failures.append(failure)
                    logger.info(f"{failure.words}; about {left} left")
            if running and time.monotonic() - told >= EVERY_SECONDS:
                told = time.monotonic()
                done = len(tasks) - len(waiting) - len(running) - len(failures)
                shown = " | ".join(_progress(process.task) for process in running)
                logger.info(f"{shown} | {done} of {len(tasks)} runs done")
            time.sleep(_LOOK_SECONDS if running else 0)
    finally:
        for process in running:  # something went wrong here, or Ctrl-C came twice
            process.popen.kill()
            process.popen.wait()
            process.output.close()
        home.release()
    return Ended(failures, stopped=bool(stop.received()))


class _Process:
    """A run that is going on, at a place from 0 on among those at a time."""

    def __init__(self, task: PlannedRun, place: int, parallel: int) -> None:
        self.task, self.place = task, place
        recipe = task.run.path.with_suffix(".toml")
        task.run.path.mkdir(parents=True, exist_ok=True)
        write_config(task.config, recipe)
        self.output = task.log.open("a+b")
        self._first = self.output.tell()
        self._began, self._stopped = time.monotonic(), False
        pipes = {"stdout": self.output, "stderr": subprocess.STDOUT}
        self.popen = start("matmix.train", recipe, parallel=parallel, place=place, **pipes)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def stop(self) -> None:
        """Asks it once to save and end."""
        if not self._stopped:
            self._stopped = True
            self.popen.send_signal(stop.SIGNALS[0])

    def failure(self) -> Failure | None:
        """Says how it failed, once it has ended; None if it did not."""
        with self.output as file:
            file.seek(self._first)
            text = file.read().decode("utf-8", "replace")
        if self.popen.returncode == 0:
            return None
        lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
        return Failure(self.task, self.popen.returncode, lines[-_SHOWN_LINES:])


def time_left(took: Sequence[float], running: Sequence[float], waiting: int, parallel: int = 1) -> str:
    """Guesses how long the rest will take, each run as long as those before on average. took, running: seconds of the
    runs that have ended, and so far of those that go on."""
    mean = fmean(took)
    seconds = sum(max(0.0, mean - spent) for spent in running) + waiting * mean
    return duration(seconds / min(parallel, max(1, len(running) + waiting)))


def _progress(task: PlannedRun) -> str:
    """Says step, loss and time left of a run that is going on, by the last record in its metrics.jsonl."""
    records, last_step = training_records(task.run.path / "metrics.jsonl"), task.last_step
    if not records or last_step is None:
        return f"{task.title}: no step recorded yet"
    record = records[-1]
    left = duration((last_step - record["step"]) * record["seconds_per_step"])
    loss = "all steps of the last record skipped" if record["loss"] is None else f"loss {record['loss']:.4f}"
    return f"{task.title}: step {record['step']:,} of {last_step:,}, {loss}, about {left} left"


def _finished_line(task: PlannedRun, seconds: float, left: str) -> str:
    summary, what = task.run.read_summary(), "stopped before its last step"
    if summary is not None:
        trained = task.config.task()
        what = ", ".join(words_on([trained.loss_metric, *trained.metrics[:1]], summary["validation"]))
    return f"{task.title}: {what}, {duration(seconds)}; about {left} left"
