"""Trains runs side by side: each as a process of its own, some at a time.

RUN.toml        what the process is given
RUN/            an ordinary run directory, and in it
RUN/train.log   what the process printed
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from matmix.launch.many import progress
from matmix.launch.many.failures import Ended, Failure
from matmix.launch.many.processes import gpu, start
from matmix.launch.many.task import Task
from matmix.train.process import stop
from matmix.train.process.exits import EXIT_STOPPED
from matmix.train.recipe import write_config
from matmix.train.run.directory import MovedError, Place
from matmix.train.tasks.base import words_on
from matmix.train.words import duration

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_SHOWN_LINES = 5


def run_tasks(tasks: Sequence[Task], parallel: int) -> Ended:
    """Trains what is not finished, `parallel` runs at a time; a failure does not keep the others from running.

    Within `listening` the signals SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 go on to the runs, which save and end; a
    second Ctrl-C ends them at once. Raises MovedError where the folder that they lie in is moved away meanwhile: what
    was running has saved and ended in it.
    """
    waiting = [task for task in tasks if not task.is_finished()]
    if len(waiting) < len(tasks):
        logger.info(f"{len(tasks) - len(waiting)} of {len(tasks)} runs are finished already")
    if not waiting:
        return Ended([], stopped=bool(stop.received()))
    running: list[_Process] = []
    failures: list[Failure] = []
    clock = progress.Clock(parallel)
    told = time.monotonic()
    home = Place(Path(os.path.commonpath([task.run.path.parent.absolute() for task in tasks])))
    home.given.mkdir(parents=True, exist_ok=True)
    home.hold()
    try:
        while waiting or running:
            if (moved := home.moved()) is not None:
                for process in running:
                    process.stop()
                for process in running:
                    process.wait()
                raise MovedError(
                    f"{home.given} {moved.words} while runs went on in it; what was running is saved there"
                )
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
        home.release()
    return Ended(failures, stopped=bool(stop.received()))


class _Process:
    """A run that is going on."""

    def __init__(self, task: Task, place: int, parallel: int) -> None:
        self.task, self.place = task, place
        recipe = task.run.path.with_suffix(".toml")
        task.run.path.mkdir(parents=True, exist_ok=True)
        write_config(task.config, recipe)
        self._output: BinaryIO = task.log.open("a+b")
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

    def wait(self) -> None:
        self._process.wait()

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
        with self._output as file:
            file.seek(self._begin)
            text = file.read().decode("utf-8", "replace")
        code = self._process.returncode
        if code == 0:
            return None
        lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
        return Failure(self.task, code, lines[-_SHOWN_LINES:])


def _progress_line(running: Sequence[Task], done: int, runs: int) -> str:
    words = [f"{task.title}: {progress.run_words(task.run.path, task.last_step)}" for task in running]
    return f"{' | '.join(words)} | {done} of {runs} runs done"


def _finished_line(task: Task, seconds: float, left: str) -> str:
    summary = task.run.read_summary()
    if summary is None:
        what = "stopped before its last step"
    else:
        trained = task.config.task()
        what = ", ".join(words_on([trained.loss_metric, *trained.metrics[:1]], summary["validation"]))
    return f"{task.title}: {what}, {duration(seconds)}; about {left} left"
