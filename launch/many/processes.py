"""Processes side by side: their cores and GPU, the signals that stop them, and that none outlives the command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from matmix.data.processes import cores, threads_of_each
from matmix.train.process import launched, stop


def say(text: str) -> None:
    """Prints, also to a terminal that was closed: what runs were trained is saved nevertheless."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def check_parallel(parallel: int) -> None:
    """Raises ValueError (one line) for a number of runs at a time that the cores are too few for."""
    if not 1 <= parallel <= cores():
        raise ValueError(f"--parallel must lie between 1 and the {cores()} cores here, got {parallel}")


def is_one_of_several() -> bool:
    """Whether a launcher such as torchrun has started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def begin_alone() -> int:
    """What comes first in a process of a command that is not for several ranks; exit code, 0 = go on.

    Where it is one of several, it outlives the signal by which the launcher ends the others when the first of them has
    found that out: rank 0 is the one that says it.
    """
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


def start(module: str, argument: Path, *, parallel: int = 1, device: str = "", **options: Any) -> subprocess.Popen:
    """`python -m module argument` in a session of its own: Ctrl-C at a terminal reaches this process alone, which
    passes it on. The module calls `begin_process` first, so that it ends when this process does.

    device: the GPU, as CUDA_VISIBLE_DEVICES names it.
    """
    own = {"OMP_NUM_THREADS": str(threads(parallel)), launched.LAUNCHER_VARIABLE: str(os.getpid())}
    if device:
        own["CUDA_VISIBLE_DEVICES"] = device
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(argument)],
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **options,
    )


def gpu(place: int) -> str:
    """The GPU, as CUDA_VISIBLE_DEVICES names it, of the run at this place; "" without GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return names[place % len(names)] if names else ""


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
