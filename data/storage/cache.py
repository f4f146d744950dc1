"""A limit for the folder of downloaded and decompressed shards: the least recently used ones go, unless they are open.

Whoever has a cached shard open holds a shared lock on the file itself, for as long as it is open; whoever makes room
removes a file only if it gets the exclusive lock. So readers of any process and run on the machine are safe from each
other, and the locks of a killed one are gone with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock

from matmix.data.formats.base import ShardInfo
from matmix.data.storage.files import write_atomic

# What a killed process left of an unfinished download is removed after so long.
_STALE_SECONDS = 6 * 3600
_ATTEMPTS = 20
_SHARE_OF_DISK = 0.5
NO_LIMIT = -1


class Hold:
    """A shared lock on a cached file, until the object is gone. Raises FileNotFoundError if there is no such file."""

    def __init__(self, path: Path) -> None:
        self._handle = -1
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._handle, fcntl.LOCK_SH)

    def is_of(self, path: Path) -> bool:
        """Whether `path` is still the file that is held: it may have been removed before the lock was there."""
        try:
            return os.path.samestat(os.fstat(self._handle), path.stat())
        except FileNotFoundError:
            return False

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)


def hold_shard(cache: Path, fetch: Callable[[], Path]) -> tuple[Path, Hold | None]:
    """The path that `fetch` gives, and what keeps it there if it lies below the folder `cache`. Raises what `fetch`
    raises."""
    for _ in range(_ATTEMPTS):
        path = fetch()
        if not path.is_relative_to(cache):
            return path, None
        try:
            hold = Hold(path)
        except FileNotFoundError:
            continue
        if hold.is_of(path):
            with contextlib.suppress(OSError):
                os.utime(path)
            return path, hold
    raise ValueError(f"{path} is removed from the data cache as soon as it is there; set data.cache_gigabytes higher")


def make_room(root: Path, limit: int, suffixes: Iterable[str]) -> None:
    """Removes shards that nobody has open, the least recently used first, until all shards in the caches below `root`
    have at most `limit` bytes (0: half of the disk), or all that are left are open. suffixes: those of shards, without
    compression."""
    if limit == NO_LIMIT:
        return
    try:
        limit = limit or int(shutil.disk_usage(root).total * _SHARE_OF_DISK)
        with FileLock(root / "room.lock", blocking=False):
            _remove_stale(root)
            found = [(stat.st_mtime_ns, stat.st_size, path) for path, stat in _shards(root, suffixes)]
            total = sum(size for _, size, _ in found)
            for _, size, path in sorted(found):
                if total <= limit:
                    return
                if _remove_if_unused(path):
                    total -= size
    except (OSError, NotImplementedError):
        return  # another process is at it, another user's folder, or no locks: the limit is a courtesy, reading goes on


def write_note(copy: Path, shard: ShardInfo, digest: str) -> None:
    """Notes the digest of a decompressed shard beside it, before `copy` gets its name.

    Older datasets have a digest of the compressed shard only. The note holds that of the decompressed bytes, taken
    while the verified compressed shard was read, and that of the compressed one, to which it belongs. Damage to the
    copy or to the note makes them disagree; then the copy is made again.
    """
    write_atomic(note_of(copy), f"{digest} {shard.sha256}\n".encode())


def read_note(copy: Path, shard: ShardInfo) -> str | None:
    """The digest that `copy` should have, None where there is no note of this shard."""
    try:
        digest, of = note_of(copy).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return digest if of == shard.sha256 else None


def note_of(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.sha256")


def _shards(root: Path, suffixes: Iterable[str]) -> list[tuple[Path, os.stat_result]]:
    found = []
    for suffix in suffixes:
        for path in root.glob(f"*-{'[0-9a-f]' * 16}/*/*{suffix}"):
            if path.name != "lengths.npy":
                with contextlib.suppress(FileNotFoundError):
                    found.append((path, path.stat()))
    return found


def _remove_if_unused(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        note_of(path).unlink(missing_ok=True)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(handle)


def _remove_stale(root: Path) -> None:
    for path in root.glob(f"*-{'[0-9a-f]' * 16}/*/*.part-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
