"""Dictionaries of tensors on disk through torch.distributed.checkpoint: every rank writes and reads its own
shards.

Two habits of that library are changed. Its failures come as a BaseException with the tracebacks of all ranks:
here they are one OSError or ValueError. And it believes its index: here that is checked first (`sharded_index`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from matmix.train.engine.full_state import MODEL, CheckpointFiles, Entry
from matmix.train.engine.sharded_index import read_index, write_index
from matmix.train.engine.snapshot import find_os_error
from matmix.train.process.distributed import is_distributed

SUBDIRECTORY, SHARD_SUFFIX = "sharded", ".distcp"

# It logs two lines for every tensor at the debug level, for whoever listens to the root logger.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
# It warns where one process is what we want. Once and for all: filters set for a while would be another thread's, too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class _Writer(dcp.FileSystemWriter):
    """Writes our index beside torch's, and weights and moments into files of their own: who wants the weights alone
    need not read the others."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        Path(self.path).mkdir(exist_ok=True)  # torch would make the folders above as well, where they were moved away
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix, results = plan.storage_data.prefix, []
        for kind, is_weight in (("", True), ("moments", False)):
            if items := [item for item in plan.items if item.index.fqn.startswith(MODEL) == is_weight]:
                place = dataclasses.replace(plan.storage_data, prefix=f"{kind}{prefix}")
                part = dataclasses.replace(plan, items=items, storage_data=place)
                results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {result.index: result.storage_data for part in results for result in part}
        write_index(dataclasses.replace(metadata, storage_data=places), Path(self.path))


class _Reader(dcp.FileSystemReader):
    """Reads tensors with an index that was checked."""

    def __init__(self, directory: Path, index: Metadata) -> None:
        super().__init__(directory)
        self.index = index

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self.index


class _TensorsOnly(DefaultLoadPlanner):
    """torch's own would unpickle what an index does not call a tensor."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise AssertionError(f"{read_item} is no tensor: the index was checked")


class _Rows(_TensorsOnly):
    """Reads the rows of one tensor from `first` on, as many as the tensor to fill has."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def create_local_plan(self) -> LoadPlan:
        ((key, rows),) = self.state_dict.items()
        wanted = ChunkStorageMetadata(torch.Size((self.first, *[0] * (rows.dim() - 1))), rows.shape)
        return LoadPlan(create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], [wanted]))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn]


def write_sharded(state: dict[str, torch.Tensor], directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes `state` (tensors, DTensors) into `directory`, on all ranks together.

    Each rank gives what it is to write: a tensor on one of them, a DTensor on all that hold a shard of it.
    Raises OSError on every rank if any rank could not write.
    """
    try:
        dcp.save(state, storage_writer=_Writer(directory), process_group=group, no_dist=not is_distributed())
    except CheckpointException as failure:
        raise storage_error(failure) from None


class ShardedFiles(CheckpointFiles):
    """Reads what `write_sharded` wrote: in one process, one tensor at a time, or on all ranks together."""

    engine_names = '"fsdp2" or "ddp"'

    def __init__(self, checkpoint: Path, layout: Mapping[str, Any], *, weights_only: bool = False) -> None:
        self.directory = checkpoint / SUBDIRECTORY
        self._index = read_index(self.directory, layout)
        self.entries = {
            key: Entry(tuple(entry.size), entry.properties.dtype)
            for key, entry in self._index.state_dict_metadata.items()
        }

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Reads those parts of the tensor, as the ranks wrote them, that hold any of the elements."""
        entry = self.entries[key]
        stop = entry.numel if stop is None else stop
        if start == 0 and stop == entry.numel:
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            self._read({key: tensor}, _TensorsOnly(), alone=True)
            return tensor.flatten()
        row = math.prod(entry.shape[1:])
        first, last = start // row, -(-stop // row)
        rows = torch.empty((last - first, *entry.shape[1:]), dtype=entry.dtype)
        self._read({key: rows}, _Rows(first), alone=True)
        return rows.flatten()[start - first * row : stop - first * row]

    def fill(self, state: dict[str, torch.Tensor]) -> None:
        """Fills tensors or DTensors, given by key, in place, on all ranks together."""
        self._read(state, _TensorsOnly(), alone=not is_distributed())

    def files_of(self, state: dict[str, torch.Tensor]) -> set[str]:
        """Names of the files from which `fill` would read on this rank."""
        plan = create_default_local_load_plan(state, self._index)
        return {self._index.storage_data[item.storage_index].relative_path for item in plan.items}

    @staticmethod
    def index_files(files: Iterable[str]) -> list[str]:
        return [name for name in files if name.startswith(f"{SUBDIRECTORY}/") and not name.endswith(SHARD_SUFFIX)]

    @staticmethod
    def weight_files(checkpoint: Path, layout: Mapping[str, Any], files: Iterable[str]) -> list[str]:
        places = read_index(checkpoint / SUBDIRECTORY, layout).storage_data.items()
        needed = {f"{SUBDIRECTORY}/{place.relative_path}" for index, place in places if index.fqn.startswith(MODEL)}
        return [name for name in files if name in needed or not name.endswith(SHARD_SUFFIX)]

    def _read(self, state: dict[str, torch.Tensor], planner: DefaultLoadPlanner, *, alone: bool) -> None:
        reader = _Reader(self.directory, self._index)
        try:
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=alone)
        except CheckpointException as failure:
            error, _ = next(iter(failure.failures.values()))
            raise ValueError(f"checkpoint {self.directory} cannot be read: {' '.join(str(error).split())}") from None


def storage_error(failure: CheckpointException) -> BaseException:
    """The OSError behind a failed save if there is one, else the first failure, which is a mistake of
    ours."""
    for rank, (error, _) in sorted(failure.failures.items()):
        if (found := find_os_error(error)) is not None:
            return OSError(found.errno, f"{found.strerror or found}{f' (rank {rank})' if is_distributed() else ''}")
    return RuntimeError(f"saving failed: {failure}")
