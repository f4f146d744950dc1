"""Sends files from one node to another over the process group of the ranks."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

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
    """Sends and receives this rank's part of `transfers`, which are the same, in the same order, on all ranks.

    Sending and receiving go on at the same time, each in this order, so that no two ranks wait for each other. group:
    as for `distributed.gather_objects`; the tensors are on the CPU. Raises OSError, once all is sent and received,
    where a file could not be read or written: what arrived then is not to be trusted.
    """
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
