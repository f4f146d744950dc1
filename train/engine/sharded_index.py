"""The index of a sharded checkpoint, `.metadata`: read without running anything, and held against its layout.

torch writes it as a pickle, and believes what it reads: an entry that is no tensor is unpickled without bounds, and a
name leads to any file. Here an unpickler that knows a handful of plain classes reads it, and of the result only tensors
are kept that the layout names, in files of the checkpoint, whole.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from matmix.data.artifacts import artifact_path
from matmix.train.engine.full_state import check_entries

INDEX = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
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
# What unpickling and looking at what came out of it may raise where a file holds something else.
_OF_NONSENSE = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ValueError, IndexError, KeyError, TypeError),
    *(RuntimeError, RecursionError, MemoryError, OverflowError, ImportError, NotImplementedError),
)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in an index")


def read_index(directory: Path, layout: Mapping[str, Any]) -> Metadata:
    """What torch is to know of the files in `directory`: exactly the tensors that `layout` names.

    layout: the checkpoint's, see `check_entries`. Raises ValueError (one line).
    """
    path = directory / INDEX
    try:
        with path.open("rb") as file:
            found = _IndexUnpickler(file).load()
    except FileNotFoundError:
        raise ValueError(f"checkpoint {directory} is damaged: its index {INDEX} is missing") from None
    except _OF_NONSENSE as error:
        raise ValueError(f"checkpoint {directory} is damaged: its index {INDEX}: {_line(error)}") from None
    try:
        return _checked(found, directory, layout)
    except _OF_NONSENSE as error:
        raise ValueError(f"checkpoint {directory} is damaged: its index {INDEX}: {_line(error)}") from None


def _checked(found: Any, directory: Path, layout: Mapping[str, Any]) -> Metadata:
    """A new index of plain values from one that may be anything. Raises what nonsense makes it raise."""
    entries, places = found.state_dict_metadata, found.storage_data
    for key, entry in entries.items():
        if type(entry) is not TensorStorageMetadata:
            raise ValueError(f"{key!a} is no tensor")
    shapes = {key: _whole_numbers(entry.size) for key, entry in entries.items()}
    check_entries(shapes, layout)
    sizes: dict[str, int] = {}
    kept: dict[str, TensorStorageMetadata] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    for key, entry in entries.items():
        shape, dtype = shapes[key], entry.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{key} has no dtype")
        chunks = []
        for chunk in entry.chunks:
            offsets, lengths = _whole_numbers(chunk.offsets), _whole_numbers(chunk.sizes)
            place = places[MetadataIndex(key, offsets)]
            _check_place(place, directory, sizes, math.prod(lengths) * dtype.itemsize)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)))
            where[MetadataIndex(key, offsets)] = _StorageInfo(place.relative_path, place.offset, place.length)
        _check_chunks(key, shape, chunks)
        kept[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
    return Metadata(kept, storage_data=where)


def _check_place(place: Any, directory: Path, sizes: dict[str, int], nbytes: int) -> None:
    """Whether bytes of a tensor can lie where the index says; sizes: of the files looked at so far."""
    name = place.relative_path
    if name not in sizes:
        path = artifact_path(directory, name, "it")
        # One that is not here lies with another node, and is looked at where it is read.
        sizes[name] = path.stat().st_size if path.exists() else sys.maxsize
    offset, length = _whole_numbers((place.offset, place.length))
    if offset + length > sizes[name] or length < nbytes or getattr(place, "transform_descriptors", None):
        raise ValueError(f"what it says of {name} cannot be")


def _check_chunks(key: str, shape: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> None:
    """Whether the chunks, cut along the first dimension, make up the whole: torch leaves alone what none covers."""
    end, fits = 0, True
    for offsets, lengths in sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks):
        begin = offsets[0] if shape else 0
        fits &= begin == end and not any(offsets[1:]) and lengths[1:] == shape[1:] and len(offsets) == len(shape)
        end += lengths[0] if shape else 1
    if not fits or end != (shape[0] if shape else 1):
        raise ValueError(f"the parts of {key} are not the whole of it")


def _whole_numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("it counts with what is no number")
    return numbers


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
