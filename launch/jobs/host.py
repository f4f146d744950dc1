"""Runs the ranks of one host as children, without torchrun: they need no agent, and no store that listens on a network.

The ranks meet in a file that only their user can open. They are told to stop as in `supervise`; when one fails, the
others are ended; when this process dies, however it does, they end with it (`matmix.train.process.launcher`).
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from matmix.launch.jobs.supervise import MARK, StopRequests, end_marked, new_mark, tell_ranks
from matmix.launch.jobs.torchrun import environment_for
from matmix.train.process import launcher
from matmix.train.process.exits import EXIT_STOPPED
from matmix.train.process.ranks import SECRET_VARIABLE, STORE_VARIABLE
from matmix.train.process.temporary import make_own_folder

# How long the other ranks have when one has failed: they may be writing.
_GRACE_SECONDS = 30.0
_LOOK_SECONDS = 0.1


def rank_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "matmix.launch.jobs.rank", *arguments]


def run_here(arguments: Sequence[str], nproc: int, attempt: str) -> int:
    """Runs the ranks of `matmix train` with these arguments once; the exit code of the one that failed first."""
    with StopRequests() as requests:
        return run_ranks(rank_command(arguments), nproc, environment_for(nproc, attempt), requests, make_own_folder())


def run_ranks(
    command: Sequence[str], nproc: int, environment: Mapping[str, str], requests: StopRequests, folder: Path
) -> int:
    """Runs `command` once for each rank until all have ended; the exit code of the one that failed first, 128 + n where
    signal n killed it.

    Every rank is sent SIGUSR2 once as soon as a stop is asked for, and SIGKILL on a second Ctrl-C. folder: this user's
    alone; the file where the ranks meet is made there.
    """
    mark = new_mark()
    store = folder / f"store-{mark}"
    common = {
        **{name: value for name, value in environment.items() if name not in ("MASTER_ADDR", "MASTER_PORT")},
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        STORE_VARIABLE: str(store),
        SECRET_VARIABLE: secrets.token_hex(16),
        launcher.VARIABLE: str(os.getpid()),
        MARK: mark,
    }
    try:
        # In sessions of their own, so that Ctrl-C at a terminal reaches this process alone.
        ranks = [
            subprocess.Popen(
                command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, start_new_session=True
            )
            for rank in range(nproc)
        ]
        return _wait(ranks, requests)
    finally:
        end_marked(mark)
        store.unlink(missing_ok=True)


def _wait(ranks: Sequence[subprocess.Popen], requests: StopRequests) -> int:
    told: set[int] = set()
    running = dict(enumerate(ranks))
    failed, since = 0, 0.0
    while running:
        time.sleep(_LOOK_SECONDS)
        for rank, process in list(running.items()):
            if (code := process.poll()) is None:
                continue
            del running[rank]
            if code and not failed:
                failed, since = code if code > 0 else 128 - code, time.monotonic()
                _say_failure(rank, process.pid, code)
                for other in running.values():
                    other.terminate()
        if failed and time.monotonic() - since > _GRACE_SECONDS:
            for process in running.values():
                process.kill()
        if requests.asked:
            tell_ranks(running.values(), requests, told)
    return failed


def _say_failure(rank: int, process: int, code: int) -> None:
    if code == EXIT_STOPPED:
        return
    what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    print(f"matmix: rank {rank} (process {process}) {what}", file=sys.stderr, flush=True)
