"""Knows the processes, ranks and devices of a run, and the few agreements between ranks that are not about tensors."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from matmix.data.artifacts import panics_as_errors, shell_line
from matmix.train.errors import RendezvousError
from matmix.train.process.heartbeat import beat, others_at_work
from matmix.train.process.rendezvous import Meeting, meet, patience

Result = TypeVar("Result")

_waiting: datetime.timedelta | None = None  # what `wait_for_ranks` has set; None = torch's default


@dataclasses.dataclass(frozen=True, slots=True)
class Distributed:
    """This process's place among all processes of the run, and its device. Usable as a context manager."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    owns_group: bool = False
    """There was no process group before, so that leaving ends the one that stands then: that of all ranks, or that of
    one process which a library needs."""

    @classmethod
    def from_environment(cls, device: Literal["auto", "cpu", "cuda"] = "auto") -> Distributed:
        """Reads torchrun's RANK, WORLD_SIZE and LOCAL_RANK; without them this is a run of one process. device: "auto"
        is CUDA where there is one. Raises ValueError if CUDA is asked for and absent, or if there are more processes
        than devices; RendezvousError where ranks stay away for a minute."""
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        chosen = choose_device(device, local_rank)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        owns_group = not dist.is_initialized()
        if owns_group and world_size > 1:
            _make_group(_backend(chosen))
        return cls(rank, world_size, local_rank, chosen, owns_group)

    def __enter__(self) -> Distributed:
        return self

    def __exit__(self, *_: object) -> None:
        if self.owns_group and dist.is_initialized():
            # An engine that outlives the group it uses, in a cycle of references, can abort the process at its exit.
            gc.collect()
            dist.destroy_process_group()


def _make_group(backend: str) -> None:
    """Makes the group of all ranks. Connections must stand within a minute; collectives may then take half an hour."""
    meeting, seconds = Meeting.from_environment(), patience()
    store, soon = meet(meeting, seconds), datetime.timedelta(seconds=seconds)
    try:
        dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.world_size, timeout=soon)
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {meeting.rank} met the others at {meeting.address} but could not connect to each of them: "
            f"{str(error).splitlines()[0]}; name the network interface that joins the nodes with GLOO_SOCKET_IFNAME "
            f"and NCCL_SOCKET_IFNAME"
        ) from None
    _set_pg_timeout(datetime.timedelta(minutes=30), dist.group.WORLD)


def wait_for_ranks(minutes: float) -> None:
    """Sets how long collectives wait for a rank (those of NCCL give up after 10 minutes)."""
    global _waiting
    _waiting = datetime.timedelta(minutes=minutes)
    if is_distributed():
        for group in list(dist.distributed_c10d._world.pg_map):
            _set_pg_timeout(_waiting, group)


def choose_device(device: str, local_rank: int) -> torch.device:
    """Returns the device of the process with this rank on its machine. Raises ValueError where it does not exist."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError('device = "cuda" was asked for, but torch finds no CUDA device here; use --device cpu')
    if local_rank >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"process {local_rank} on this machine has no CUDA device: there are {count}; start torchrun with "
            f"{shell_line(f'--nproc-per-node={count}')}"
        )
    return torch.device("cuda", local_rank)


def ensure_group(device: torch.device) -> None:
    """Makes a process group of this one process if there is none, for libraries that insist on one."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)


def _backend(device: torch.device) -> str:
    # gloo carries the agreements between processes and CPU tensors even where NCCL carries the gradients.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


@dataclasses.dataclass(frozen=True, slots=True)
class FolderGroup:
    """The ranks that write to one folder: all of them where they share it, or those of one node."""

    number: int  # of the folder, among those that the ranks of the run write to
    index: int  # of this rank among those that share it
    count: int  # of them

    @property
    def leads(self) -> bool:
        """True where this rank makes, renames and clears what is in the folder."""
        return self.index == 0

    @classmethod
    def of_all(cls) -> FolderGroup:
        """One folder that all ranks see."""
        return cls(0, *rank_and_world_size())

    @classmethod
    def of_node(cls) -> FolderGroup:
        """A folder for each node, from what launchers say in GROUP_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE."""
        rank, world_size = rank_and_world_size()
        count = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
        return cls(int(os.environ.get("GROUP_RANK") or 0), int(os.environ.get("LOCAL_RANK") or rank), count)


def make_side_group() -> dist.ProcessGroup | None:
    """Makes a group of all ranks for what a second thread agrees on; None in a single process. Called on all ranks."""
    return dist.new_group(backend="gloo", timeout=_waiting) if is_distributed() else None


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's `value`, a small plain object, in order of rank, on every rank. group: one of all ranks that
    carries the exchange; two threads need one each."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def from_rank_zero(value: Any) -> Any:
    """Returns rank 0's `value` on every rank; the others' are not sent."""
    box = [value]
    if is_distributed():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Waits until every rank is here."""
    gather_objects(None)


def agree(
    action: Callable[[], Result], *, here: bool = True, group: dist.ProcessGroup | None = None
) -> list[Result | None]:
    """Runs `action` on the ranks that say `here`; an error on one rank is raised on all. Called on all ranks. Returns
    the results in order of rank, on every rank, None where it did not run. group: as for `gather_objects`.

    An OSError or ValueError, which says what is wrong with the storage or with what the user gave, is raised on every
    rank: that of the first rank which failed, noted with its number. Any other error is a mistake in the program: it is
    raised as it is where it happened, and as RuntimeError on the other ranks.
    """
    rank, world_size = rank_and_world_size()
    result, error, told = None, None, None
    beat("work on the storage")
    try:
        with panics_as_errors():
            result = action() if here else None
    except (OSError, ValueError) as raised:
        error = told = raised
        if world_size > 1 and "(rank " not in complaint(error):
            error.add_note(f"(rank {rank})")
    except Exception as raised:
        error, told = raised, RuntimeError(f"rank {rank} failed: {raised!r}")
    with others_at_work("work on the storage that is done here"):
        outcomes = gather_objects((result, told), group)
    if error is not told:
        raise error
    for number, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise error if number == rank else failure
    return [value for value, _ in outcomes]


def complaint(error: OSError | ValueError) -> str:
    """Returns the text of an error, with the number of the rank that `agree` noted."""
    text = getattr(error, "strerror", None) or str(error)
    return " ".join([text, *getattr(error, "__notes__", [])[:1]])
