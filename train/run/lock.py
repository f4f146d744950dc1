"""One job at a time on a run, from rank 0's first look at it to the very end. (Without torch, for launchers.)

The lock of a folder is the kernel's (flock), so that it ends with the process that holds it however that dies. An
object store knows no such locks, so there a lease, URL/leases/00000007.json of the run's seventh start, is held as long
as its number of renewals goes up: who wants the run watches for a minute. No clocks are compared, and an owner that is
known to be gone is not waited for. Each start has a lease of its own, which the store lets only one job create, and the
newest counts: an owner whose renewal hung for too long writes to a lease of the past, and finds out that it lost the
run before it makes a checkpoint valid.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from matmix.data.storage.remote import RemoteFolder
from matmix.train.errors import RunFailure
from matmix.train.run.outcome import attempt_id, job_of

logger = logging.getLogger(__name__)

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
# After a node's death a file server keeps its locks for a while (NFS: 90 seconds).
_PATIENCE_SECONDS = 150.0
_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """The lock of a run directory, which the job that writes there holds."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "lock.json"
        self.handle = -1
        _locks.add(self)

    def release(self) -> None:
        """Gives it back, if it is held. The file stays: removing it could remove the next owner's."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def acquire(self) -> None:
        """Takes the lock, and makes the directory if there is none. On a file system without locks a warning says so.
        Raises ValueError (one line) that names the owner, if there is one; OSError if nothing can be written there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        waiting = False
        while True:
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _HELD:
                    where = f"the file system of {self.path.parent} ({error.strerror})"
                    logger.warning(f"no locks on {where}: make sure that no second job uses this run directory")
                    return
            owner = self.owner()
            if not is_earlier_attempt(owner) or time.monotonic() > deadline:
                self.release()
                raise in_use(self.path.parent, owner)
            if not waiting:
                waiting = True
                attempt = f"this job's last attempt in {self.path.parent} ({describe_owner(owner)})"
                logger.info(f"waiting for the end of {attempt}")
            time.sleep(1.0)
        with contextlib.suppress(OSError):  # the lock holds without what it says of its owner
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, (json.dumps(this_process()) + "\n").encode(), 0)

    def owner(self) -> dict[str, Any]:
        """Returns what the last holder wrote about itself, {} where that cannot be read."""
        try:
            return dict(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}


def this_process() -> dict[str, Any]:
    """Returns what an owner says about itself to others."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "attempt": attempt_id(), "since": since}


def is_earlier_attempt(owner: dict[str, Any]) -> bool:
    """Returns True for an earlier start of this same job on a node that died: the file server does not know yet."""
    attempt = str(owner.get("attempt") or "")
    return attempt != attempt_id() and job_of(attempt) == job_of(attempt_id())


def describe_owner(owner: dict[str, Any]) -> str:
    """Describes the owner in a few words, from what it wrote."""
    said = "host {host}, process {pid}, attempt {attempt}, since {since}"
    return said.format_map(collections.defaultdict(lambda: None, owner)) if owner else "owner unknown"


def in_use(run_dir: str | Path, owner: dict[str, Any]) -> ValueError:
    """Returns the error for those who want a run that another job has."""
    what = f"run_dir {run_dir} is in use by another job ({describe_owner(owner)})"
    return ValueError(f"{what}; wait for it to end or cancel it, or choose another --run-dir")


# -- leases ----------------------------------------------------------------------------------------------

FOLDER = "leases"
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
        """Number of starts of the run, this one included; 0 before `acquire`."""
        self._content: dict[str, Any] = {}
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None
        self._taken_by: dict[str, Any] | None = None

    def acquire(self) -> None:
        """Takes the lease, waiting where its owner may be gone. Raises ValueError (one line) that names the owner, and
        RemoteError or PermissionError where the store fails."""
        starts, last = self._newest()
        if last.get("held") and not _is_gone(last["owner"]):
            self._watch(last)
        self.starts = starts + 1
        owner = {**this_process(), "space": _process_space()}
        self._content = {"held": True, "owner": owner, "token": uuid.uuid4().hex, "renewals": 0, "starts": self.starts}
        with contextlib.suppress(FileExistsError):  # of another job, or ours: the answer to the first try may be lost
            self._send(self.remote.create)
        time.sleep(SETTLE_SECONDS)
        _, newest = self._newest()
        if newest.get("token") != self._content["token"]:
            raise in_use(self.remote.url, newest.get("owner", {}))
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

    def _watch(self, lease: dict[str, Any]) -> None:
        """Returns once nothing was renewed for long enough; raises ValueError as soon as something is."""
        owner = describe_owner(lease["owner"])
        looking = f"looking for {LAPSE_SECONDS:.0f} s if it is gone"
        logger.info(f"{self.remote.url} was held by another job ({owner}): {looking}")
        end = time.monotonic() + LAPSE_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, LAPSE_SECONDS / 10))
            _, now = self._newest()
            if not now.get("held"):
                return
            if (now["token"], now["renewals"]) != (lease["token"], lease["renewals"]):
                raise in_use(self.remote.url, now.get("owner", {}))

    def _renew(self) -> None:
        while self._taken_by is None and not self._ended.wait(RENEWAL_SECONDS):
            with contextlib.suppress(OSError):  # a store that is away is asked again; others may take the run meanwhile
                self._taken_by = self._find_other()
                if self._taken_by is None:
                    self._content["renewals"] += 1
                    self._send(self.remote.write)

    def _find_other(self) -> dict[str, Any] | None:
        """Returns the lease of another job that has taken the run, if there is one. One that is missing or cannot be
        read is nobody's: a store that has just come back may not show it yet, and it is written again."""
        starts, newest = self._newest()
        is_ours = starts < self.starts or newest.get("token", self._content["token"]) == self._content["token"]
        return None if is_ours else newest

    def _newest(self) -> tuple[int, dict[str, Any]]:
        """Returns how often the run was started, and the last start's lease, {} where that cannot be read."""
        name = max(self._names(), default=_name(0))
        content: dict[str, Any] = {}
        with contextlib.suppress(ValueError, TypeError):
            content = dict(json.loads(self.remote.read(name) or "{}"))
        return int(Path(name).stem), content

    def _names(self) -> list[str]:
        return [name for name in self.remote.sizes(FOLDER) if _NAME.fullmatch(name)]

    def _send(self, put: Callable[[str, bytes], None]) -> None:
        put(_name(self.starts), json.dumps(self._content).encode())


def _name(starts: int) -> str:
    return f"{FOLDER}/{starts:08d}.json"


def _process_space() -> str:
    """Names the place where numbers of processes mean the same: one boot of one host, and one container on it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_gone(owner: dict[str, Any]) -> bool:
    place, here = (owner.get("space"), owner.get("host")), (_process_space(), socket.gethostname())
    was_here = bool(owner.get("space")) and place == here and isinstance(owner.get("pid"), int)
    return is_earlier_attempt(owner) or (was_here and not psutil.pid_exists(owner["pid"]))


# A forked child (a reading process) shares the lock and may outlive this process by seconds.
os.register_at_fork(after_in_child=lambda: [lock.release() for lock in list(_locks)])
