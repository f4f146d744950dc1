"""Runs torchrun's agent as a child and passes signals on so that the ranks have time to save.

An agent that is told to end kills its workers 30 s later, whatever they are writing. Here the ranks are told directly,
with SIGUSR2, on which they save and leave; the agent sees them go and ends. What is left when it has ended is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import psutil

from matmix.train.process import launcher

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_RANK = "matmix.launch.jobs.rank"
MARK = "MATMIX_AGENT"  # in the environment of an agent and all that it starts


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

    While it runs, every rank is sent SIGUSR2 once as soon as a stop is asked for, and SIGKILL on a second Ctrl-C. When
    this process dies, the agent and then its ranks end, too (`matmix.train.process.launcher`).
    """
    mark = new_mark()
    # In a session of its own, so that Ctrl-C at a terminal reaches this process alone.
    own = {launcher.VARIABLE: str(os.getpid()), MARK: mark}
    agent = subprocess.Popen(command, env={**environment, **own}, start_new_session=True)
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
        tell_ranks(ranks, requests, told)
    end_marked(mark)
    return code if code >= 0 else 128 - code


def tell_ranks(ranks: Iterable[psutil.Process | subprocess.Popen], requests: StopRequests, told: set[int]) -> None:
    """Sends what a stop asks for to each of these processes, SIGUSR2 only if it is not among those that were `told`."""
    for process in ranks:
        with contextlib.suppress(psutil.Error):
            if requests.at_once:
                process.kill()
            elif process.pid not in told:
                told.add(process.pid)
                process.send_signal(signal.SIGUSR2)


def new_mark() -> str:
    """A value of MATMIX_AGENT that no other start has."""
    return f"{os.getpid()}-{time.time_ns()}"


def end_marked(mark: str) -> None:
    """Kills what bears this mark: an agent or a rank that was killed leaves what it has started."""
    left = list(_marked(mark))
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=10)


def _ranks(agent: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(agent).children():
            with contextlib.suppress(psutil.Error):
                if _RANK in process.cmdline():
                    yield process


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                yield process
