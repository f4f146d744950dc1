"""Dictionaries of tensors on disk through torch.distributed.checkpoint: every rank writes and reads its own shards.

Two habits of that library are changed. Its failures come as a BaseException with the tracebacks of all ranks: here they
are one OSError or ValueError. And it believes its index, `.metadata`, which is a pickle: an entry that is no tensor is
unpickled without bounds, a name leads to any file, and what no entry covers stays as it was. So `index.json` says the
same beside it in plain values and is what is read; `.metadata` is for torch's tools alone. Only tensors are taken that
the checkpoint's layout names, whole, in files that are there.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from matmix.data.artifacts import artifact_path, read_json
from matmix.data.storage.files import open_durable
from matmix.train.engine.base import find_os_error
from matmix.train.engine.full_state import MODEL, CheckpointFiles, Entry, check_entries
from matmix.train.process.distributed import is_distributed

SUBDIRECTORY, SHARD_SUFFIX = "sharded", ".distcp"
INDEX = "index.json"

# key -> {"dtype": "float32", "shape": [...], "chunks": [[offsets, sizes, file, first byte, bytes], ...]}
Plain = dict[str, dict[str, Any]]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)}  # fmt: skip
# What looking at the contents of a JSON file may raise where it holds something else.
_OF_NONSENSE = (AttributeError, ValueError, LookupError, TypeError, RuntimeError, RecursionError, OverflowError)

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

    def _read_rows(self, key: str, first: int, last: int) -> torch.Tensor:
        entry = self.entries[key]
        rows = torch.empty((last - first, *entry.shape[1:]) if entry.shape else (), dtype=entry.dtype)
        self._read({key: rows}, _Rows(first) if entry.shape else _TensorsOnly(), alone=True)
        return rows

    def fill(self, state: dict[str, torch.Tensor]) -> None:
        """Fills tensors or DTensors, given by key, in place, on all ranks together."""
        self._read(state, _TensorsOnly(), alone=not is_distributed())

    def files_of(self, state: dict[str, torch.Tensor]) -> set[str]:
        """Returns the names of the files from which `fill` would read on this rank."""
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
    """Returns the OSError behind a failed save if there is one, else the first failure as a mistake in the program."""
    for rank, (error, _) in sorted(failure.failures.items()):
        if (cause := find_os_error(error)) is not None:
            return OSError(cause.errno, f"{cause.strerror or cause}{f' (rank {rank})' if is_distributed() else ''}")
    return RuntimeError(f"saving failed: {failure}")


# -- the index -----------------------------------------------------------------------------------------------------


def write_index(index: Metadata, directory: Path) -> None:
    """Writes `index.json` beside torch's files; index: what torch says of them."""
    plain: Plain = {}
    for key, entry in index.state_dict_metadata.items():
        chunks = []
        for chunk in entry.chunks:
            place = index.storage_data[MetadataIndex(key, chunk.offsets)]
            chunks.append([list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length])
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        plain[key] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
    with open_durable(directory / INDEX) as file:
        file.write(json.dumps(plain).encode())


def read_index(directory: Path, layout: Mapping[str, Any]) -> Metadata:
    """Returns an index for torch of the files in `directory`: exactly the tensors that the checkpoint's `layout` names.
    Raises ValueError (one line) for anything else; see `check_entries`."""
    try:
        return _checked(read_json(directory / INDEX), directory, layout)
    except FileNotFoundError:
        raise ValueError(f"checkpoint {directory} is damaged: its index {INDEX}, or a file in it, is missing") from None
    except _OF_NONSENSE as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"checkpoint {directory} is damaged: its index {INDEX}: {text}") from None


def _checked(plain: Any, directory: Path, layout: Mapping[str, Any]) -> Metadata:
    """Makes an index for torch from values that may be anything. Raises any of `_OF_NONSENSE`."""
    shapes = {key: _counts(entry["shape"]) for key, entry in plain.items()}
    check_entries(shapes, layout)
    sizes: dict[str, int] = {}  # bytes of the files looked at so far
    kept: dict[str, TensorStorageMetadata] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    for key, entry in plain.items():
        dtype = _DTYPES[entry["dtype"]]
        chunks = []
        for offsets, lengths, name, begin, nbytes in entry["chunks"]:
            chunk = ChunkStorageMetadata(torch.Size(_counts(offsets)), torch.Size(_counts(lengths)))
            if name not in sizes:
                path = artifact_path(directory, name, "it")
                # One that is not here lies with another node, and is looked at where it is read.
                sizes[name] = path.stat().st_size if path.exists() else sys.maxsize
            begin, nbytes = _counts((begin, nbytes))
            if begin + nbytes > sizes[name] or nbytes < math.prod(chunk.sizes) * dtype.itemsize:
                raise ValueError(f"what it says of {name} cannot be")
            chunks.append(chunk)
            where[MetadataIndex(key, chunk.offsets)] = _StorageInfo(name, begin, nbytes)
        if not _make_up(shapes[key], [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]):
            raise ValueError(f"the parts of {key} are not the whole of it")  # torch leaves alone what none covers
        kept[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shapes[key]), chunks)
    return Metadata(kept, storage_data=where)


def _make_up(shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Returns whether (offsets, sizes) of chunks are the cells of a grid over `shape`; ranks without a part have empty
    ones."""
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in chunks):
        return False
    cells = [tuple(zip(*chunk, strict=True)) for chunk in chunks if math.prod(chunk[1])]
    expected = 1
    for dimension, size in enumerate(shape):
        end, cuts = 0, sorted({cell[dimension] for cell in cells})
        for begin, length in cuts:
            if begin != end:
                return False
            end += length
        if end != size:
            return not math.prod(shape)
        expected *= len(cuts)
    return len(cells) == len(set(cells)) == expected


def _counts(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("where it should hold a count it holds something else")
    return numbers
