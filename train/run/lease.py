"""One job at a time on a run at a URL: its rank 0 holds the run's lease, an object that it renews.

    URL/leases/00000007.json      of the run's seventh start

An object store knows no locks that end with their holder, so a lease is held as long as its number of renewals goes
up. Who wants a run that is held watches the lease: a new renewal means that the owner lives; none for a minute, that it
is gone. No clocks are compared. An owner that is known to be gone, because it was an earlier attempt of the same
job or a process of this host that is not there any more, is not waited for.

Each start has a lease of its own, which the store lets only one job create, and the newest lease counts. So an owner
whose renewal hung for longer than a minute writes to a lease of the past and wins nothing back: it finds out that it
lost the run before it makes a checkpoint valid.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from matmix.data.storage.remote import RemoteFolder
from matmix.train.errors import RunFailure
from matmix.train.run.lock import describe_owner, in_use, is_earlier_attempt, this_process

logger = logging.getLogger(__name__)

FOLDER = "leases"
BEFORE = "lease.json"
"""The one object that earlier versions wrote."""
RENEWAL_SECONDS = 15.0
LAPSE_SECONDS = 60.0
# For stores that let several create one object: all see afterwards whose it is. A write takes far less.
SETTLE_SECONDS = 1.0
_NAME = re.compile(rf"{FOLDER}/\d{{8}}\.json")


class LeaseLostError(RunFailure):
    """Another job has taken over the run while this one could not reach the store."""


class Lease:
    """The lease of a run at a URL, which the job that writes there holds."""

    def __init__(self, remote: RemoteFolder) -> None:
        self.remote = remote
        self.starts = 0
        """How often the run was started, this time included; 0 before `acquire`."""
        self._content: dict[str, Any] = {}
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None
        self._taken_by: dict[str, Any] | None = None

    def acquire(self) -> None:
        """Takes the lease, waiting where its owner may be gone.

        Raises ValueError that names the owner in one line, and RemoteError or PermissionError where the store cannot
        be read and written.
        """
        starts, found = self._newest()
        if found.get("held") and not _is_gone(found["owner"]):
            self._watch(found)
        self.starts = starts + 1
        owner = {**this_process(), "space": _process_space()}
        self._content = {"held": True, "owner": owner, "token": uuid.uuid4().hex, "renewals": 0, "starts": self.starts}
        with contextlib.suppress(FileExistsError):  # of another job, or ours: the answer to the first try may be lost
            self._send(self.remote.create)
        time.sleep(SETTLE_SECONDS)
        _, found = self._newest()
        if found.get("token") != self._content["token"]:
            raise in_use(self.remote.url, found.get("owner", {}))
        with contextlib.suppress(OSError):  # only the newest counts
            self.remote.remove(sorted({*self._names()} - {_name(self.starts)}))
        self._ended.clear()
        self._renewing = threading.Thread(target=self._renew, name="lease of the run", daemon=True)
        self._renewing.start()

    def check(self) -> None:
        """Raises LeaseLostError if another job holds the lease, asking the store."""
        if self._taken_by is None and self._content:
            self._taken_by = self._find_other()
        if self._taken_by is not None:
            owner = describe_owner(self._taken_by.get("owner", {}))
            raise LeaseLostError(f"the run at {self.remote.url} was taken over by another job ({owner}): this one ends")

    def release(self) -> None:
        """Gives it back if it is held, so that the next start need not wait. Raises nothing."""
        self._ended.set()
        if self._renewing is None:
            return
        self._renewing.join()
        self._renewing = None
        with contextlib.suppress(OSError):  # it lapses by itself
            if self._find_other() is None:
                self._content["held"] = False
                self._send(self.remote.write)
        self._content = {}

    def _watch(self, found: dict[str, Any]) -> None:
        """Returns once nothing was renewed for long enough; raises ValueError as soon as something is."""
        owner = describe_owner(found["owner"])
        looking = f"looking for {LAPSE_SECONDS:.0f} s if it is gone"
        logger.info(f"{self.remote.url} was held by another job ({owner}): {looking}")
        end = time.monotonic() + LAPSE_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, LAPSE_SECONDS / 10))
            _, now = self._newest()
            if not now.get("held"):
                return
            if (now["token"], now["renewals"]) != (found["token"], found["renewals"]):
                raise in_use(self.remote.url, now.get("owner", {}))

    def _renew(self) -> None:
        while self._taken_by is None and not self._ended.wait(RENEWAL_SECONDS):
            with contextlib.suppress(OSError):  # a store that is away is asked again; others may take the run meanwhile
                self._taken_by = self._find_other()
                if self._taken_by is None:
                    self._content["renewals"] += 1
                    self._send(self.remote.write)

    def _find_other(self) -> dict[str, Any] | None:
        """The lease of another job that has taken the run, if there is one.

        A lease that is missing or cannot be read belongs to nobody: a store that has just come back may not show it
        yet, and it is written again.
        """
        starts, found = self._newest()
        is_ours = starts < self.starts or found.get("token", self._content["token"]) == self._content["token"]
        return None if is_ours else found

    def _newest(self) -> tuple[int, dict[str, Any]]:
        """How often the run was started, and what the last start's lease says, {} where that cannot be read."""
        name = max(self._names(), default=BEFORE)
        raw, found = self.remote.read(name), {}
        with contextlib.suppress(ValueError, TypeError):
            found = dict(json.loads(raw or "{}"))
        return (found.get("starts", 0) if name == BEFORE else int(Path(name).stem)), found

    def _names(self) -> list[str]:
        return [name for name in self.remote.sizes(FOLDER) if _NAME.fullmatch(name)]

    def _send(self, put: Callable[[str, bytes], None]) -> None:
        put(_name(self.starts), json.dumps(self._content).encode())


def _name(starts: int) -> str:
    return f"{FOLDER}/{starts:08d}.json"


def _process_space() -> str:
    """Where numbers of processes mean the same: one boot of one host, and one container on it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_gone(owner: dict[str, Any]) -> bool:
    place, here = (owner.get("space"), owner.get("host")), (_process_space(), socket.gethostname())
    was_here = bool(owner.get("space")) and place == here and isinstance(owner.get("pid"), int)
    return is_earlier_attempt(owner) or (was_here and not psutil.pid_exists(owner["pid"]))
