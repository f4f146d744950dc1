"""Holds what a launcher tells each process, and ends that with the launcher. (Standard library only, for launchers.)"""

import os
import signal
import socket
import time
from collections.abc import Iterable

from matmix.data.processes import end_with
from matmix.train.process import stop
from matmix.train.process.exits import EXIT_FAILED

LAUNCHER_VARIABLE = "MATMIX_LAUNCHER"
"""The number of the launcher's process."""
STORE_VARIABLE = "MATMIX_STORE"
"""A file of this host in which ranks meet; without it they meet at MASTER_ADDR and MASTER_PORT."""
SECRET_VARIABLE = "MATMIX_SECRET"
"""A word that the processes of one start have in common, and those of no other know."""
NODE_VARIABLE = "MATMIX_NODE"
"""The name by which people know this node; without it the host's name."""
NODES_VARIABLE = "MATMIX_NODES"
"""The names of all nodes in order of their ranks, with commas between them."""

_launcher: int | None = None


def node_name() -> str:
    """Returns the name of this node that a person finds in the scheduler's list."""
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()


def nodes_of(ranks: Iterable[int]) -> list[str]:
    """Returns the sorted names of the nodes that hold `ranks`, or [] where the launcher has not said."""
    names, per_node = os.environ.get(NODES_VARIABLE), int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    if not names or not per_node:
        return []
    held = {rank // per_node for rank in ranks}
    return sorted(name for number, name in enumerate(names.split(",")) if number in held)


def as_ranges(numbers: Iterable[int]) -> str:
    """Writes numbers for people: [0, 1, 2, 5] -> "0-2, 5"."""
    pieces: list[list[int]] = []
    for number in sorted(numbers):
        if pieces and number == pieces[-1][-1] + 1:
            pieces[-1][1:] = [number]
        else:
            pieces.append([number])
    return ", ".join("-".join(map(str, piece)) for piece in pieces)


def wait_for_port(host: str, port: int, seconds: float) -> None:
    """Returns when somebody answers at this port, of which torch's clients would log pages. Raises socket.gaierror at
    once where the name does not resolve, TimeoutError (its text is the last reason) after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:  # a name server that is busy may yet answer
                raise
            reason = f"the name {host} does not resolve here ({error.strerror})"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(reason)
        time.sleep(0.2)


# -- the launcher's life ------------------------------------------------------------------------------------------


def follow_launcher() -> None:
    """Has the kernel kill this process when its launcher dies, and ends it at once if that is dead already: it would
    train unattended, meet the ranks of the next start in its store, and stand in their way.

    Called before anything else. Our launchers give their number; of a torchrun it is the parent; others have none.
    """
    global _launcher
    given = os.environ.pop(LAUNCHER_VARIABLE, "")  # what this process starts has another parent
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
    """Returns True in a process that has a launcher."""
    return _launcher is not None


def save_when_it_ends() -> None:
    """Has the run in this process, which has something to lose now, save and stop when the launcher dies."""
    assert _launcher is not None
    if not end_with(_launcher, signal.SIGTERM):
        stop.request()


def is_gone() -> bool:
    """Returns True once the launcher has died."""
    return _launcher is not None and os.getppid() != _launcher


def _is_of_torchrun(process: int) -> bool:
    """Tells torchrun's agent, and what that has started around the rank, from a process that adopts orphans."""
    try:
        with open(f"/proc/{process}/maps", "rb") as file:
            agent = any(b"libtorch" in line for line in file)
        with open(f"/proc/{process}/environ", "rb") as file:
            return agent or b"TORCHELASTIC_RUN_ID=" in file.read()
    except OSError:
        # Not Linux, or not for us to read. The first process of all is where orphans go.
        return process != 1
