"""Nodes of a run: files sent from one to another over the process group of the ranks, and the room that they have."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from matmix.train.process.distributed import rank_and_world_size
from matmix.train.process.heartbeat import beat

_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One file on its way."""

    name: str  # below the folder of the sender, and of the receiver
    size: int
    source: int  # rank that sends
    target: int  # rank that receives, another one


def exchange(folder: Path, transfers: Sequence[Transfer], group: dist.ProcessGroup | None = None) -> None:
    """Sends and receives this rank's part of `transfers`, which are the same, in the same order, on all ranks. Both go
    on at the same time, so that no two ranks wait for each other. group: as for `distributed.gather_objects`. Raises
    OSError, once all is moved, where a file could not be read or written: what arrived is not to be trusted."""
    rank, _ = rank_and_world_size()
    incoming = [transfer for transfer in transfers if transfer.target == rank]
    outgoing = [transfer for transfer in transfers if transfer.source == rank]
    failures: list[BaseException] = []

    def send_all() -> None:
        try:
            failures.extend(filter(None, [_move(folder / each.name, each, group, sends=True) for each in outgoing]))
        except BaseException as error:
            failures.append(error)

    # A daemon: where the other rank is gone it may wait for it long after this process has given up.
    sender = threading.Thread(target=send_all, name="sends files", daemon=True)
    sender.start()
    received = [_move(folder / each.name, each, group, sends=False) for each in incoming]
    sender.join()
    for failure in (*failures, *filter(None, received)):
        raise failure


def _move(path: Path, transfer: Transfer, group: dist.ProcessGroup | None, *, sends: bool) -> OSError | None:
    """Sends or receives as many bytes as were announced, whatever the storage does, and returns what it did."""
    failure, file = None, None
    chunk = torch.zeros(min(_CHUNK, transfer.size), dtype=torch.uint8)
    try:
        if not sends:
            path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("rb" if sends else "wb", buffering=0)
    except OSError as error:
        failure = error
    for start in range(0, transfer.size, _CHUNK):
        part = chunk[: min(_CHUNK, transfer.size - start)]
        if not sends:
            dist.recv(part, transfer.source, group=group)
        if failure is None:
            try:
                if (file.readinto(part.numpy()) if sends else file.write(part.numpy())) != len(part):
                    failure = OSError(f"{path} is shorter than it was" if sends else "the disk is full")
            except OSError as error:
                failure = error
        if sends:
            dist.send(part, transfer.target, group=group)
        beat("sending a file" if sends else "receiving a file")
    if file is not None:
        file.close()
    return failure


# -- room ------------------------------------------------------------------------------------------------

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
# (limit, use, statistics) of a group of processes, by version of the kernel's interface.
_FILES = {
    "": ("memory.max", "memory.current", "memory.stat"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
}
_GIVEN_BACK = ("inactive_file", "active_file")  # copies of files: the kernel drops them where memory is needed


def free_bytes(folder: Path) -> int:
    """Returns how many bytes `folder`, which exists, has room for. Raises OSError."""
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    if is_in_memory(folder):
        free = min(free, psutil.virtual_memory().available, *_left_of_limits())
    return free


def is_in_memory(folder: Path) -> bool:
    """Returns whether what is written to `folder` takes memory."""
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
        limit, use, statistics = _FILES[kinds]
        group = top / path.lstrip("/")
        for place in (group, *group.parents):
            if not place.is_relative_to(top):
                break
            with contextlib.suppress(OSError, ValueError):  # no limit, or none that can be read
                most, used = int((place / limit).read_text()), int((place / use).read_text())
                numbers = dict(line.split() for line in (place / statistics).read_text().splitlines())
                yield max(0, most - used + sum(int(numbers.get(name, 0)) for name in _GIVEN_BACK))
