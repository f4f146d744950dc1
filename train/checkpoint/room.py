"""How much more may be written to a folder. If the folder lies in memory, the limits of the machine and the job count,
too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
# (limit, use, statistics) of a group of processes, by version of the kernel's interface.
_FILES = {
    "": ("memory.max", "memory.current", "memory.stat"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}
_GIVEN_BACK = ("inactive_file", "active_file")  # copies of files: the kernel drops them where memory is needed


def free_bytes(folder: Path) -> int:
    """What `folder`, which exists, has room for, in bytes. Raises OSError."""
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    if is_in_memory(folder):
        free = min(free, psutil.virtual_memory().available, *_left_of_limits())
    return free


def is_in_memory(folder: Path) -> bool:
    """Whether what is written to `folder` takes memory."""
    folder, kind, longest = folder.resolve(), "", -1
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        if len(mount.parts) >= longest and (mount == folder or mount in folder.parents):
            kind, longest = partition.fstype, len(mount.parts)
    return kind in _MEMORY_FILE_SYSTEMS


def _left_of_limits(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yields what each limit on the memory of this process's group, or of one above it, leaves (schedulers set one)."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds not in _FILES:
            continue
        top = root / kinds
        group = top / path.lstrip("/")
        for place in (group, *group.parents):
            if not place.is_relative_to(top):
                break
            if (left := _left(place, *_FILES[kinds])) is not None:
                yield left


def _left(group: Path, limit: str, use: str, statistics: str) -> int | None:
    """What a group may still take, None where it has no limit, or none that can be read."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / use).read_text())
        if not most.isdigit():
            return None
        numbers = dict(line.split() for line in (group / statistics).read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(most) - used + sum(int(numbers.get(name, 0)) for name in _GIVEN_BACK))
