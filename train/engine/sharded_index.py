"""The index of a sharded checkpoint, which says where each tensor lies; it is checked against the checkpoint's layout.

torch's own index, `.metadata`, is a pickle, and torch believes what it reads there: an entry that is no tensor is
unpickled without bounds, a name leads to any file, and what no entry covers stays as it was. So `index.json` says the
same beside it in plain values and is what is read; `.metadata` is for torch's tools alone. Only tensors are taken that
the layout names, whole, in files that are there.
"""

from __future__ import annotations

import json
import math
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

from matmix.data.artifacts import artifact_path, read_json
from matmix.data.storage.files import open_durable
from matmix.train.engine.full_state import check_entries

INDEX = "index.json"

# key -> {"dtype": "float32", "shape": [...], "chunks": [[offsets, sizes, file, first byte, bytes], ...]}
Plain = dict[str, dict[str, Any]]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)}  # fmt: skip
# What looking at the contents of a JSON file may raise where it holds something else.
_OF_NONSENSE = (AttributeError, ValueError, LookupError, TypeError, RuntimeError, RecursionError, OverflowError)


def write_index(index: Metadata, directory: Path) -> None:
    """Writes `index.json` beside torch's files; index: what torch says of them."""
    with open_durable(directory / INDEX) as file:
        file.write(json.dumps(_to_plain(index)).encode())


def read_index(directory: Path, layout: Mapping[str, Any]) -> Metadata:
    """What torch is to know of the files in `directory`: exactly the tensors that `layout` names.

    layout: the checkpoint's, see `check_entries`. Raises ValueError (one line).
    """
    try:
        return _checked(read_json(directory / INDEX), directory, layout)
    except FileNotFoundError:
        raise ValueError(f"checkpoint {directory} is damaged: its index {INDEX}, or a file in it, is missing") from None
    except _OF_NONSENSE as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"checkpoint {directory} is damaged: its index {INDEX}: {text}") from None


def _to_plain(index: Metadata) -> Plain:
    """Returns plain values from torch's index, of tensors alone."""
    plain: Plain = {}
    for key, entry in index.state_dict_metadata.items():
        chunks = []
        for chunk in entry.chunks:
            place = index.storage_data[MetadataIndex(key, chunk.offsets)]
            chunks.append([list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length])
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        plain[key] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
    return plain


def _checked(plain: Any, directory: Path, layout: Mapping[str, Any]) -> Metadata:
    """An index for torch from values that may be anything. Raises what nonsense makes it raise."""
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
        _check_chunks(key, shapes[key], chunks)
        kept[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shapes[key]), chunks)
    return Metadata(kept, storage_data=where)


def _check_chunks(key: str, shape: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> None:
    """Raises ValueError unless the chunks make up the whole, as a grid along any dimensions: torch leaves alone what
    none covers."""
    if not _make_up(shape, [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]):
        raise ValueError(f"the parts of {key} are not the whole of it")


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
        raise ValueError("it counts with what is no number")
    return numbers
