"""Watches the process that started this rank: without it nothing would ever end the rank.

A rank that lives on alone would train unattended, meet the ranks of the next start in its store, and stand in its way.
So it is killed by the kernel as soon as its launcher dies. From its first step on it saves and stops instead, since
it has something to lose.

Our own launchers give their number in MATMIX_LAUNCHER. torchrun gives none: a rank that it started looks at its parent,
and knows by the libraries in that process's memory whether it is an agent or somebody who adopts orphans.
"""

from __future__ import annotations

import os
import signal

from matmix.data.parent_process import end_with
from matmix.train.process import stop
from matmix.train.process.exits import EXIT_FAILED

VARIABLE = "MATMIX_LAUNCHER"

_launcher: int | None = None


def follow_launcher() -> None:
    """From now on this process is killed when its launcher dies; ends it at once if that is dead already.

    Called before anything else. Without a launcher, as where a person starts the process in a shell, it does nothing.
    """
    global _launcher
    given = os.environ.pop(VARIABLE, "")  # what this process starts has another parent
    if given:
        _launcher = int(given)
    elif "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:
        _launcher = os.getppid()
    else:
        return
    if not end_with(_launcher, signal.SIGKILL) or not (given or _is_of_torchrun(_launcher)):
        os.write(2, b"matmix: the launcher of this process is gone\n")
        os._exit(EXIT_FAILED)


def followed() -> bool:
    """Whether this process has a launcher."""
    return _launcher is not None


def save_when_it_ends() -> None:
    """From now on the run in this process is asked to save and stop when the launcher dies."""
    assert _launcher is not None
    if not end_with(_launcher, signal.SIGTERM):
        stop.request()


def is_gone() -> bool:
    """Whether the launcher has died."""
    return _launcher is not None and os.getppid() != _launcher


def _is_of_torchrun(process: int) -> bool:
    """Whether a process is torchrun's agent, or what that has started (a script or container around the rank)."""
    try:
        with open(f"/proc/{process}/maps", "rb") as file:
            agent = any(b"libtorch" in line for line in file)
        with open(f"/proc/{process}/environ", "rb") as file:
            return agent or b"TORCHELASTIC_RUN_ID=" in file.read()
    except OSError:
        # Not Linux, or not for us to read. The first process of all is where orphans go.
        return process != 1
