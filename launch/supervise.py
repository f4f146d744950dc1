"""Runs torchrun's agent as a child and passes signals on so that the ranks have time to save.

An agent that is told to end kills its workers 30 s later, whatever they are writing. Here the ranks are told directly,
with SIGUSR2, on which they save and leave; the agent sees them go and ends. What is left when it has ended is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

import psutil

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_RANK = "matmix.launch.rank"
_MARK = "MATMIX_AGENT"  # in the environment of an agent and all that it starts


class StopRequests:
    """Signals that this process has got, in order; a context manager."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> StopRequests:
        self._previous = {number: signal.signal(number, self._note) for number in _STOPPING}
        return self

    def _note(self, number: int, _frame: object) -> None:
        self.received.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        return bool(self.received)

    @property
    def at_once(self) -> bool:
        """A second Ctrl-C."""
        return self.received.count(signal.SIGINT) > 1


def run_agent(command: Sequence[str], environment: Mapping[str, str], requests: StopRequests) -> int:
    """Runs an agent until it ends; its exit code, 128 + n where signal n killed it.

    While it runs, every rank is sent SIGUSR2 once as soon as a stop is asked for, and SIGKILL on a second Ctrl-C.
    """
    # In a session of its own, so that Ctrl-C at a terminal reaches this process alone.
    mark = f"{os.getpid()}-{time.time_ns()}"
    agent = subprocess.Popen(
        command,
        env={**environment, _MARK: mark},
        start_new_session=True,
        preexec_fn=_end_with_parent(os.getpid()),
    )
    told: set[int] = set()
    started = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = agent.wait(timeout=0.2)
            break
        if not requests.asked:
            continue
        ranks = list(_ranks(agent.pid))
        started = started or bool(ranks)
        if not started:
            agent.terminate()
        for process in ranks:
            with contextlib.suppress(psutil.Error):
                if requests.at_once:
                    process.kill()
                elif process.pid not in told:
                    told.add(process.pid)
                    process.send_signal(signal.SIGUSR2)
    left = list(_marked(mark))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=10)
    return code if code >= 0 else 128 - code


def _ranks(agent: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(agent).children():
            with contextlib.suppress(psutil.Error):
                if _RANK in process.cmdline():
                    yield process


def _marked(mark: str) -> Iterator[psutil.Process]:
    """What the agent and its ranks have started and is still there: an agent that was killed leaves its ranks."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                yield process


def _end_with_parent(parent: int):
    """For the child to call before it becomes the agent: SIGTERM when the launcher dies, however it does (Linux)."""
    library = ctypes.CDLL(None)

    def ask() -> None:
        if hasattr(library, "prctl"):
            library.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)

    return ask
