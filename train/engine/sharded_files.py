"""Reads the shards that the ranks of `sharded_writer` wrote, at any number of ranks. What is believed is `index.json`,
not torch's index, a pickle: only tensors are taken that the layout names, whole, in files that are there."""

import io
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from matmix.data.artifacts import artifact_path, read_json
from matmix.train.engine.full_state import MODEL, OPTIMIZER, CheckpointFiles, Entry, check_entries
from matmix.train.optim.base import rows_here

SUBDIRECTORY = "sharded"
INDEX = "index.json"
MOMENTS = "moments"
"""The beginning of the names of files without weights."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)}  # fmt: skip
# What looking at the contents of a JSON file may raise where it holds something else.
_OF_NONSENSE = (AttributeError, ValueError, LookupError, TypeError, RuntimeError, RecursionError, OverflowError)


class Chunk(NamedTuple):
    """A rectangle of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class ShardedFiles(CheckpointFiles):
    """Reads chunks of tensors, one at a time."""

    engine_names = '"fsdp2" or "ddp"'

    def __init__(self, checkpoint: Path, layout: Mapping[str, Any], *, weights_only: bool = False) -> None:
        self.directory = checkpoint / SUBDIRECTORY
        damaged = f"checkpoint {self.directory} is damaged: its index {INDEX}"
        try:
            self.entries, self.chunks = _checked(read_json(self.directory / INDEX), self.directory, layout)
        except FileNotFoundError:
            raise ValueError(f"{damaged}, or a file in it, is missing") from None
        except _OF_NONSENSE as error:
            raise ValueError(f"{damaged}: {' '.join(str(error).split()) or type(error).__name__}") from None

    def _read_rows(self, key: str, first: int, last: int) -> torch.Tensor:
        entry = self.entries[key]
        shape = (last - first, *entry.shape[1:]) if entry.shape else ()
        chunks = list(self._chunks_of(key, first, last))
        if [chunk.sizes for chunk in chunks] == [shape]:
            return self._load(chunks[0])
        rows = torch.empty(shape, dtype=entry.dtype)
        for chunk in chunks:
            target, piece = rows, self._load(chunk)
            if entry.shape:
                begin = chunk.offsets[0]
                end = begin + chunk.sizes[0]
                target = target[max(begin - first, 0) : end - first]
                piece = piece[max(first - begin, 0) : last - begin]
            for dimension in range(1, len(entry.shape)):
                target = target.narrow(dimension, chunk.offsets[dimension], chunk.sizes[dimension])
            target.copy_(piece)
        return rows

    def _chunks_of(self, key: str, first: int, last: int) -> Iterable[Chunk]:
        """Returns the chunks that hold some of rows [first, last)."""
        for chunk in self.chunks[key]:
            begin, size = (chunk.offsets[0], chunk.sizes[0]) if chunk.sizes else (first, last - first)
            if math.prod(chunk.sizes) and max(begin, first) < min(begin + size, last):
                yield chunk

    def _load(self, chunk: Chunk) -> torch.Tensor:
        try:
            with (self.directory / chunk.file).open("rb") as file:
                file.seek(chunk.begin)
                raw = io.BytesIO(file.read(chunk.length))
            tensor = torch.load(raw, map_location="cpu", weights_only=True)
            if tuple(tensor.shape) != chunk.sizes:
                raise ValueError(f"{chunk.file} holds a tensor {list(tensor.shape)}, not {list(chunk.sizes)}")
            return tensor
        except Exception as error:  # torch.load raises many kinds
            text = " ".join(str(error).split())
            raise ValueError(f"checkpoint {self.directory} cannot be read: {text}") from None

    def files_for(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Returns the names of the files with what this rank holds of a model and its optimizer. tensors: parameters
        and buffers, sharded or not; an entry of another shape than its parameter's is held whole, unless it was written
        in parts."""
        files = set()
        for key, entry in self.entries.items():
            name = key.removeprefix(MODEL)
            if key.startswith(OPTIMIZER):
                name = key.removeprefix(OPTIMIZER).rpartition(".")[0]
            rows, shape = (0, math.prod(entry.shape[:1])), tuple(tensors[name].shape)
            if entry.shape == shape or (entry.shape[:1] == shape[:1] and len(self.chunks[key]) > 1):
                rows = rows_here(tensors[name])
            files |= {f"{SUBDIRECTORY}/{chunk.file}" for chunk in self._chunks_of(key, *rows)}
        return files

    @staticmethod
    def shards(files: Iterable[str]) -> set[str]:
        return {name for name in files if name.startswith(f"{SUBDIRECTORY}/") and name.endswith(".distcp")}

    @staticmethod
    def weight_files(layout: Mapping[str, Any], files: Iterable[str]) -> list[str]:
        return [name for name in files if not name.startswith(f"{SUBDIRECTORY}/{MOMENTS}")]


def _checked(plain: Any, directory: Path, layout: Mapping[str, Any]) -> tuple[dict[str, Entry], dict[str, list[Chunk]]]:
    """Returns exactly the tensors that the layout names, and the chunks of each, from values that may be anything.
    Raises any of `_OF_NONSENSE`."""
    entries = {key: Entry(_counts(entry["shape"]), _DTYPES[entry["dtype"]]) for key, entry in plain.items()}
    check_entries({key: entry.shape for key, entry in entries.items()}, layout)
    sizes: dict[str, int] = {}  # bytes of the files looked at so far
    chunks: dict[str, list[Chunk]] = {}
    for key, entry in entries.items():
        chunks[key] = []
        for offsets, lengths, name, begin, nbytes in plain[key]["chunks"]:
            chunk = Chunk(_counts(offsets), _counts(lengths), name, *_counts((begin, nbytes)))
            if name not in sizes:
                path = artifact_path(directory, name, "it")
                # One that is not here lies with another node, and is looked at where it is read.
                sizes[name] = path.stat().st_size if path.exists() else sys.maxsize
            if begin + nbytes > sizes[name] or nbytes < math.prod(chunk.sizes) * entry.dtype.itemsize:
                raise ValueError(f"what it says of {name} cannot be")
            chunks[key].append(chunk)
        if not _make_up(entry.shape, chunks[key]):
            raise ValueError(f"the parts of {key} are not the whole of it")
    return entries, chunks


def _make_up(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """Returns whether chunks are the cells of a grid over `shape`; ranks without a part have empty ones."""
    if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in chunks):
        return False
    cells = [tuple(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in chunks if math.prod(chunk.sizes)]
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
