"""One job at a time in a run directory: rank 0 holds RUN/lock.json from before the first look at it to the very end.

The lock is the kernel's (flock), so that it ends with the process that holds it however that dies, and no stale one is
left behind. The file's content only tells others who holds it. (Without torch, for launchers.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any

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
        """Takes the lock, and makes the directory if there is none.

        Raises ValueError that names the owner, where there is one, in one line; OSError where the directory cannot be
        written to. On a file system without locks there is a warning, and two jobs are not kept apart.
        """
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
                    logger.warning(
                        f"no locks on the file system of {self.path.parent} ({error.strerror}): "
                        f"make sure that no second job uses this run directory"
                    )
                    return
            owner = self.owner()
            if not is_earlier_attempt(owner) or time.monotonic() > deadline:
                self.release()
                raise in_use(self.path.parent, owner)
            if not waiting:
                waiting = True
                logger.info(
                    f"waiting for the end of this job's last attempt in {self.path.parent} ({describe_owner(owner)})"
                )
            time.sleep(1.0)
        self._sign()

    def owner(self) -> dict[str, Any]:
        """What the last holder wrote about itself, {} where that cannot be read."""
        try:
            return dict(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def _sign(self) -> None:
        with contextlib.suppress(OSError):  # the lock holds without it
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, (json.dumps(this_process()) + "\n").encode(), 0)


def this_process() -> dict[str, Any]:
    """What an owner says about itself to others."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "attempt": attempt_id(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def is_earlier_attempt(owner: dict[str, Any]) -> bool:
    """Returns True where the owner is an earlier start of this same job, requeued after its node died: it is gone, but
    the file server does not know yet."""
    attempt = str(owner.get("attempt") or "")
    return attempt != attempt_id() and job_of(attempt) == job_of(attempt_id())


def describe_owner(owner: dict[str, Any]) -> str:
    """The owner in a few words, from what it wrote."""
    if not owner:
        return "owner unknown"
    return (
        f"host {owner.get('host')}, process {owner.get('pid')}, attempt {owner.get('attempt')}, "
        f"since {owner.get('since')}"
    )


def in_use(run_dir: str | Path, owner: dict[str, Any]) -> ValueError:
    """What those are told who want a run that another job has."""
    what = f"run_dir {run_dir} is in use by another job ({describe_owner(owner)})"
    return ValueError(f"{what}; wait for it to end or cancel it, or choose another --run-dir")


def _forget_in_child() -> None:
    # A forked child (a reading process) shares the lock and may outlive this process by seconds.
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
