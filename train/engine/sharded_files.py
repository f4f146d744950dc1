"""Dictionaries of tensors on disk through torch.distributed.checkpoint: every rank writes and reads its own
shards.

Two habits of that library are changed. Its failures come as a BaseException with the tracebacks of all ranks:
here they are one OSError or ValueError. And its index is a pickle, which could run anything: here it is read
by an unpickler that knows the handful of plain classes the index consists of and refuses all else.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from matmix.train.distributed import is_distributed
from matmix.train.engine.full_state import Entry, FullState

# It logs two lines for every tensor at the debug level, for whoever listens to the root logger.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
# It warns where one process is what we want. Once and for all: filters set for a while would be another thread's, too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # Python 3.13
    "collections": {"OrderedDict"},
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in an index")


class _Reader(dcp.FileSystemReader):
    """Reads the index once, safely."""

    index: Metadata | None = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        if self.index is None:
            path = Path(self.path) / ".metadata"
            try:
                with path.open("rb") as file:
                    self.index = _IndexUnpickler(file).load()
            except FileNotFoundError:
                raise ValueError(f"checkpoint {path.parent} is damaged: its index .metadata is missing") from None
            except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, IndexError) as error:
                raise ValueError(f"checkpoint {path.parent} is damaged: its index .metadata: {error}") from None
        return self.index


def write_sharded(state: dict[str, torch.Tensor], directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes `state` (tensors, DTensors) into `directory`, on all ranks together.

    Each rank gives what it is to write: a tensor on one of them, a DTensor on all that hold a shard of it.
    Raises OSError on every rank if any rank could not write.
    """
    try:
        writer = dcp.FileSystemWriter(directory)
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=not is_distributed())
    except CheckpointException as failure:
        raise storage_error(failure) from None


def read_sharded(state: dict[str, torch.Tensor], directory: Path) -> None:
    """Fills the tensors or DTensors of `state` in place from `directory`, on all ranks together."""
    reader = _Reader(directory)
    _read(state, reader, alone=not is_distributed())


def read_sizes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Key and full shape of everything in `directory`."""
    entries = _Reader(directory).read_metadata().state_dict_metadata
    return {key: tuple(e.size) for key, e in entries.items() if isinstance(e, TensorStorageMetadata)}


class ShardedFiles(FullState):
    """Reads what `write_sharded` wrote, in one process and one tensor at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError if the index cannot be read."""
        self._reader = _Reader(directory)
        index = self._reader.read_metadata().state_dict_metadata
        self.entries = {
            key: Entry(tuple(entry.size), entry.properties.dtype)
            for key, entry in index.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        entry = self.entries[key]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        _read({key: tensor}, self._reader, alone=True)
        return tensor.flatten()[start:stop]


def _read(state: dict[str, torch.Tensor], reader: _Reader, *, alone: bool) -> None:
    reader.read_metadata()
    try:
        dcp.load(state, storage_reader=reader, no_dist=alone)
    except CheckpointException as failure:
        error, _ = next(iter(failure.failures.values()))
        raise ValueError(f"checkpoint {reader.path} cannot be read: {error}") from None


def storage_error(failure: CheckpointException) -> BaseException:
    """The OSError behind a failed save if there is one, else the first failure, which is a mistake of
    ours."""
    for rank, (error, _) in sorted(failure.failures.items()):
        if (found := find_os_error(error)) is not None:
            return OSError(found.errno, f"{found.strerror or found}{f' (rank {rank})' if is_distributed() else ''}")
    return RuntimeError(f"saving failed: {failure}")


def find_os_error(error: BaseException | None) -> OSError | None:
    """The OSError that `error` is, was caused by, or hides (torch's writer reports a failed write as
    RuntimeError)."""
    seen = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, RuntimeError) and ("file write failed" in str(error) or "unexpected pos" in str(error)):
        return OSError(None, "the file could not be written whole")
    return None
