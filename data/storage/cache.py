"""Keeps the folder of downloaded and decompressed shards to a size: removes the least recently used that nobody reads.

A process holds a shared lock on a cached shard for as long as it has the file open, and removes a file only where it
gets the exclusive lock. So all readers on a machine are safe from each other, and a killed process leaves no locks.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock

# Age of an unfinished download at which the process that began it must have been killed.
_STALE_SECONDS = 6 * 3600
_ATTEMPTS = 20
_SHARE_OF_DISK = 0.5
NO_LIMIT = -1
# Of the caches, each with a folder for each split.
_FOLDERS = f"*-{'[0-9a-f]' * 16}/*"


class Hold:
    """Holds a shared lock on a cached file until it is deleted. Raises FileNotFoundError if there is no such file."""

    def __init__(self, path: Path) -> None:
        self.handle = -1
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self.handle, fcntl.LOCK_SH)

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)


def hold_shard(cache: Path, fetch: Callable[[], Path]) -> tuple[Path, Hold | None]:
    """Returns the path that `fetch` gives, and a lock on it if it lies below the folder `cache`. Raises as `fetch`."""
    for _ in range(_ATTEMPTS):
        path = fetch()
        if not path.is_relative_to(cache):
            return path, None
        try:
            hold = Hold(path)
            is_same = os.path.samestat(os.fstat(hold.handle), path.stat())
        except FileNotFoundError:
            continue
        if is_same:  # else the held file was removed before the lock was there
            with contextlib.suppress(OSError):
                os.utime(path)
            return path, hold
    raise ValueError(f"{path} is removed from the data cache as soon as it is there; set data.cache_gigabytes higher")


def make_room(root: Path, limit: int, suffixes: Iterable[str]) -> None:
    """Removes unused shards, the least recently used first, until the caches below `root` have at most `limit` bytes: 0
    = half of the disk, NO_LIMIT = any. suffixes: those of uncompressed shards. Shards that are open stay."""
    if limit == NO_LIMIT:
        return
    try:
        limit = limit or int(shutil.disk_usage(root).total * _SHARE_OF_DISK)
        with FileLock(root / "room.lock", blocking=False):
            for path in root.glob(f"{_FOLDERS}/*.part-*"):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                        path.unlink()
            shards = []
            for path in (path for suffix in suffixes for path in root.glob(f"{_FOLDERS}/*{suffix}")):
                if path.name != "lengths.npy":
                    with contextlib.suppress(FileNotFoundError):
                        stat = path.stat()
                        shards.append((stat.st_mtime_ns, stat.st_size, path))
            total = sum(size for _, size, _ in shards)
            for _, size, path in sorted(shards):
                if total <= limit:
                    return
                if _remove_if_unused(path):
                    total -= size
    except (OSError, NotImplementedError):
        return  # another process makes room, or the folder is another user's or has no locks: reading goes on


def _remove_if_unused(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
