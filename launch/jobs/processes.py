"""Runs ranks as children, directly or by torchrun's agent, and passes signals on so that they can save."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import psutil

from matmix.data.processes import threads_of_each
from matmix.train.process import launched
from matmix.train.process.exits import EXIT_STOPPED
from matmix.train.process.node_folders import make_own_folder

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
RANK_MODULE = "matmix.launch.jobs.rank"
# How long the other ranks have when one has failed: they may be writing.
_GRACE_SECONDS = 30.0
_MARK = "MATMIX_AGENT"  # in the environment of all that one start has started


def check_counts(verb: object, *names: str) -> None:
    """Raises ValueError where one of these numbers of nodes or processes is below 1."""
    for name in names:
        if getattr(verb, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(verb, name)}")


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Notes the signals that ask this process to stop, in order, while the block runs."""
    received: list[int] = []
    handlers = {n: signal.signal(n, lambda number, _: received.append(number)) for n in _STOPPING}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def is_at_once(requests: Sequence[int]) -> bool:
    """Returns True after a second Ctrl-C."""
    return requests.count(signal.SIGINT) > 1


def environment_for(nproc: int, attempt: str) -> dict[str, str]:
    """Returns this process's environment with what the ranks need."""
    threads = str(threads_of_each(nproc))  # torchrun would set their number to 1, with a warning
    return {"OMP_NUM_THREADS": threads, **os.environ, "MATMIX_ATTEMPT": attempt, "PYTHONSAFEPATH": "1"}


def rank_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", RANK_MODULE, *arguments]


def run_agent(command: Sequence[str], environment: Mapping[str, str], requests: Sequence[int]) -> int:
    """Runs an agent until it ends; its exit code, 128 + n where signal n killed it. One without ranks is ended."""
    return _run(command, {"": environment}, requests, agents=True)


def run_ranks(command: Sequence[str], nproc: int, environment: Mapping[str, str], requests: Sequence[int]) -> int:
    """Runs `command` once for each rank of this host; the exit code of the first that failed, 128 + n for signal n."""
    folder = make_own_folder()
    store = folder / f"store-{_new_name()}"
    common = {
        **{name: value for name, value in environment.items() if name not in ("MASTER_ADDR", "MASTER_PORT")},
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        launched.STORE_VARIABLE: str(store),
        launched.SECRET_VARIABLE: secrets.token_hex(16),
    }
    ranks = {f"rank {rank}": {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)}
    try:
        return _run(command, ranks, requests, agents=False)
    finally:
        for path in folder.glob(f"{store.name}*"):  # also what `matmix.train.process.console` has beside it
            path.unlink(missing_ok=True)


def _run(
    command: Sequence[str], environments: Mapping[str, Mapping[str, str]], requests: Sequence[int], *, agents: bool
) -> int:
    """Runs `command` in each of these environments, which go by the name that a failure is reported by ("" = not
    reported); what is left when all have ended is killed. When this process dies, they end with it.
    Each rank is sent SIGUSR2 once as soon as a stop is asked for, on which it saves and leaves, and SIGKILL on a second
    Ctrl-C. So are ranks of agents: one that is told to end would kill them 30 s later, whatever they are writing."""
    own = {launched.LAUNCHER_VARIABLE: str(os.getpid()), _MARK: _new_name()}
    told: set[int] = set()
    failed, since = 0, 0.0
    running: dict[str, subprocess.Popen] = {}
    try:
        for name, environment in environments.items():
            # In a session of its own, so that Ctrl-C at a terminal reaches this process alone.
            running[name] = subprocess.Popen(command, env={**environment, **own}, start_new_session=True)
        while running:
            time.sleep(0.1)
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
            for process in running.values() if requests else ():
                ranks = _ranks_of(process.pid) if agents else [process]
                if not ranks and not told:
                    process.terminate()
                for rank in ranks:
                    with contextlib.suppress(psutil.Error):
                        if is_at_once(requests):
                            rank.kill()
                        elif rank.pid not in told:
                            rank.send_signal(signal.SIGUSR2)
                    told.add(rank.pid)
    finally:
        _end_marked(own[_MARK])
    return failed


def say_failure(name: str, process: int, code: int) -> int:
    """Prints how a process with a name failed, unless it was told to stop; its exit code, 128 + n for signal n."""
    if name and code != EXIT_STOPPED:
        what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        print(f"matmix: {name} (process {process}) {what}", file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _new_name() -> str:
    """Returns a name that no other start on this host has."""
    return f"{os.getpid()}-{time.time_ns()}"


def _ranks_of(agent: int) -> list[psutil.Process]:
    known = psutil.process_iter(["ppid", "cmdline"])
    return [rank for rank in known if rank.info["ppid"] == agent and RANK_MODULE in (rank.info["cmdline"] or ())]


def _end_marked(mark: str) -> None:
    """Kills what bears this mark: an agent or a rank that was killed leaves what it has started."""
    running = psutil.process_iter(["environ"])
    left = [process for process in running if (process.info["environ"] or {}).get(_MARK) == mark]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + 10
    while any(map(_lives, left)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    """Returns False also for what has ended and is not fetched: the first process of a container may never do that."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
