"""Runs ranks as children, directly on one host or by torchrun's agent, and passes signals on so that they can save.

Ranks are told to stop directly, with SIGUSR2, on which they save and leave: an agent that is told to end would kill its
workers 30 s later, whatever they are writing. What is left when all have ended is killed, and when this process dies,
however it does, they end with it (`matmix.train.process.launched`).

On one host the ranks need no agent, and no store that listens on a network: they meet in a file that only their user
can open.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from matmix.data.processes import threads_of_each
from matmix.train.process import launched
from matmix.train.process.exits import EXIT_STOPPED
from matmix.train.process.launched import SECRET_VARIABLE, STORE_VARIABLE
from matmix.train.process.node_folders import make_own_folder

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_RANK = "matmix.launch.jobs.rank"
# How long the other ranks have when one has failed: they may be writing.
_GRACE_SECONDS = 30.0
_LOOK_SECONDS = 0.1
MARK = "MATMIX_AGENT"  # in the environment of an agent and all that it starts


def check_counts(verb: object, *names: str) -> None:
    """Raises ValueError where one of these numbers of nodes or processes is below 1."""
    for name in names:
        if getattr(verb, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(verb, name)}")


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

    While it runs, its ranks are told to stop as `_run` says; an agent that has none yet is ended.
    """
    seen: set[int] = set()

    def ranks(agents: Sequence[subprocess.Popen]) -> list[psutil.Process]:
        running = [rank for agent in agents for rank in _ranks(agent.pid)]
        seen.update(rank.pid for rank in running)
        for agent in agents:
            if not seen:
                agent.terminate()
        return running

    return _run(command, {"": environment}, requests, ranks)


def _ranks(agent: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(agent).children():
            with contextlib.suppress(psutil.Error):
                if _RANK in process.cmdline():
                    yield process


# -- one host, without torchrun ---------------------------------------------------------------------------------------


def environment_for(nproc: int, attempt: str) -> dict[str, str]:
    """This process's environment with what the ranks need."""
    threads = str(threads_of_each(nproc))  # torchrun would set their number to 1, with a warning
    return {"OMP_NUM_THREADS": threads, **os.environ, "MATMIX_ATTEMPT": attempt, "PYTHONSAFEPATH": "1"}


def rank_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", _RANK, *arguments]


def run_here(arguments: Sequence[str], nproc: int, attempt: str) -> int:
    """Runs the ranks of `matmix train` with these arguments once; the exit code of the one that failed first."""
    with StopRequests() as requests:
        return run_ranks(rank_command(arguments), nproc, environment_for(nproc, attempt), requests, make_own_folder())


def run_ranks(
    command: Sequence[str], nproc: int, environment: Mapping[str, str], requests: StopRequests, folder: Path
) -> int:
    """Runs `command` once for each rank until all have ended; the exit code of the one that failed first, 128 + n where
    signal n killed it.

    The ranks are told to stop as `_run` says. folder: this user's alone; the file where the ranks meet is made there.
    """
    store = folder / f"store-{_new_name()}"
    common = {
        **{name: value for name, value in environment.items() if name not in ("MASTER_ADDR", "MASTER_PORT")},
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        STORE_VARIABLE: str(store),
        SECRET_VARIABLE: secrets.token_hex(16),
    }
    ranks = {f"rank {rank}": {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)}
    try:
        return _run(command, ranks, requests, lambda running: running)
    finally:
        for path in folder.glob(f"{store.name}*"):  # also what `matmix.train.process.console` has beside it
            path.unlink(missing_ok=True)


# -- starting, watching, ending ----------------------------------------------------------------------------------------


def _run(
    command: Sequence[str],
    environments: Mapping[str, Mapping[str, str]],
    requests: StopRequests,
    find_ranks: Callable[[Sequence[subprocess.Popen]], Sequence[psutil.Process | subprocess.Popen]],
) -> int:
    """Runs `command` in each of these environments until all have ended; the exit code of the first that failed.

    environments: by the name that a failure is reported by, "" = not reported. find_ranks: the ranks among, or below,
    the children that run. Every rank is sent SIGUSR2 once as soon as a stop is asked for, and SIGKILL on a second
    Ctrl-C. When this process dies, however it does, its children and their ranks end, too
    (`matmix.train.process.launched`).
    """
    mark = _new_name()
    own = {launched.LAUNCHER_VARIABLE: str(os.getpid()), MARK: mark}
    told: set[int] = set()
    failed, since = 0, 0.0
    running: dict[str, subprocess.Popen] = {}
    try:
        for name, environment in environments.items():
            # In a session of its own, so that Ctrl-C at a terminal reaches this process alone.
            running[name] = subprocess.Popen(command, env={**environment, **own}, start_new_session=True)
        while running:
            time.sleep(_LOOK_SECONDS)
            for name, process in list(running.items()):
                if (code := process.poll()) is None:
                    continue
                del running[name]
                if code and not failed:
                    failed, since = say_failure(name, process.pid, code), time.monotonic()
                    for other in running.values():
                        other.terminate()
            if failed and time.monotonic() - since > _GRACE_SECONDS:
                for process in running.values():
                    process.kill()
            if requests.asked:
                _tell_ranks(find_ranks(list(running.values())), requests, told)
    finally:
        _end_marked(mark)
    return failed


def say_failure(name: str, process: int, code: int) -> int:
    """Prints how a process failed, unless it has no name or stopped as it was told; its exit code, 128 + n where
    signal n killed it. code: as `subprocess` gives it."""
    if name and code != EXIT_STOPPED:
        what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        print(f"matmix: {name} (process {process}) {what}", file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _new_name() -> str:
    """Returns a name that no other start on this host has."""
    return f"{os.getpid()}-{time.time_ns()}"


def _tell_ranks(ranks: Iterable[psutil.Process | subprocess.Popen], requests: StopRequests, told: set[int]) -> None:
    """Sends what a stop asks for to each of these processes, SIGUSR2 only if it is not among those that were `told`."""
    for process in ranks:
        with contextlib.suppress(psutil.Error):
            if requests.at_once:
                process.kill()
            elif process.pid not in told:
                told.add(process.pid)
                process.send_signal(signal.SIGUSR2)


def _end_marked(mark: str) -> None:
    """Kills what bears this mark: an agent or a rank that was killed leaves what it has started."""
    left = [found for found in psutil.process_iter(["environ"]) if (found.info["environ"] or {}).get(MARK) == mark]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=10)
