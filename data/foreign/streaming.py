"""Opens the StreamingDataset of a directory on all ranks together, and clears up what it shares among them."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from matmix.data.artifacts import one_line
from matmix.data.storage.remote import first_line


def streaming_dataset(path: str, local: str, validate_hash: str | None, **options: Any) -> Any:
    """Returns the StreamingDataset of a directory, on all ranks together. Memory that it shares among them is named by
    numbers which all programs of a machine count up: they are given out one after another, and what a killed run left
    behind for the same folder is removed. Raises ValueError (one line) where the library refuses the directory."""
    from streaming import StreamingDataset  # 3 seconds
    from streaming.base.constant import SHM_TO_CLEAN

    gc.collect()  # what an earlier run of this process has left in cycles of references holds its folder
    with _meeting() as leads, contextlib.ExitStack() as stack:
        lock, problem = None, None
        if leads:
            name = f"matmix-streaming-{os.geteuid()}.lock"
            stack.enter_context(FileLock(Path(tempfile.gettempdir(), name)))
            if "remote" in options:
                lock = FileLock(Path(local, ".in-use"), timeout=0)
                try:
                    lock.acquire()
                except Timeout:
                    problem = f"another run of this machine reads {path} by way of {local}: set data.cache_dir"
                else:
                    _remove_stale(local, SHM_TO_CLEAN)
        if (problem := _told(problem)) is not None:
            if lock is not None:
                lock.release()
            raise ValueError(problem)
        try:
            dataset = StreamingDataset(
                local=local, validate_hash=validate_hash, shuffle=False, allow_unsafe_types=False, **options
            )
        except Exception as error:
            if lock is not None:
                lock.release()
            raise ValueError(f"{path} cannot be read by StreamingDataset: {one_line(first_line(error))}") from None
    shared = [dataset._locals_shm, *(part.shm for part in _arrays(dataset))]
    left = [dataset._cache_filelock_path, dataset._shared_barrier.filelock_path] if leads else []
    weakref.finalize(dataset, _clean_up, os.getpid(), shared, left, lock)
    return dataset


def _arrays(dataset: Any) -> list[Any]:
    scalars = [dataset._next_epoch.arr, dataset._cache_usage.arr]
    return [dataset._shared_barrier._arr, *scalars, dataset._shard_states, dataset._shard_access_times]


def _clean_up(process: int, shared: list[Any], files: list[str], lock: FileLock | None) -> None:
    """Removes what a StreamingDataset shared, once the process that made it is done with it."""
    if os.getpid() != process:
        return
    for memory in shared:
        with contextlib.suppress(OSError, BufferError):
            memory.cleanup()
        # The library does it again when the process ends, when another one may have memory of that name.
        memory.created_shms.clear()
    for file in files:
        Path(file).unlink(missing_ok=True)
    if lock is not None:
        lock.release()


def _remove_stale(local: str, names: list[str]) -> None:
    """Removes the shared memory that StreamingDatasets of a folder have left which nobody reads any more."""
    memory = Path("/dev/shm")
    for path in memory.glob("[0-9]*_locals"):
        with contextlib.suppress(OSError):
            if os.path.abspath(local).encode() in path.read_bytes()[4:].split(b"\0"):
                for name in names:
                    (memory / path.name.replace("locals", name)).unlink(missing_ok=True)


@contextlib.contextmanager
def _meeting() -> Iterator[bool]:
    """Tells the library by the environment who the ranks are; yields whether this one is its machine's first."""
    from torch import distributed

    alone = not (distributed.is_available() and distributed.is_initialized())
    rank, world = (0, 1) if alone else (distributed.get_rank(), distributed.get_world_size())
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or world) if not alone else 1
    told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "LOCAL_RANK": rank % local}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        yield rank % local == 0
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _told(problem: str | None) -> str | None:
    """Returns the problem of any rank, once all ranks are here."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return problem
    found: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, problem)
    return next(filter(None, found), None)
