"""The portable form of a checkpoint: whole tensors in safetensors files, which every engine reads at any number
of ranks.

STEP/portable/state-00001.safetensors, state-00002 ...: float32 weights, persistent buffers and, of each
parameter that has been updated, exp_avg, exp_avg_sq and step, under the keys of `matmix.train.engine.full_state`.
Each file stands alone; which one holds a tensor does not matter.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from matmix.train.engine.full_state import Entry, FullState, check_entries

KIND = SUBDIRECTORY = "portable"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def open_full(checkpoint: Path, layout: dict[str, Any]) -> FullState:
    """The whole tensors of a checkpoint of any kind; layout: as its manifest has it."""
    if layout["engine"] == KIND:
        return PortableFiles(checkpoint / SUBDIRECTORY, layout)
    if layout["engine"] == "deepspeed":
        from matmix.train.engine.deepspeed.files import ZeroFiles

        return ZeroFiles(checkpoint, layout)
    from matmix.train.engine.fsdp import SUBDIRECTORY as SHARDED
    from matmix.train.engine.sharded_files import ShardedFiles

    return ShardedFiles(checkpoint / SHARDED, layout)


class PortableFiles(FullState):
    """Reads what `write_portable` wrote: only the part of a tensor that is asked for."""

    def __init__(self, directory: Path, layout: Mapping[str, Any]) -> None:
        """directory: of the files; layout: of the checkpoint. Raises ValueError if a file cannot be read, or if they do
        not hold the layout's tensors."""
        self.directory = directory
        self.entries: dict[str, Entry] = {}
        self._files = {}
        for path in sorted(directory.glob("*.safetensors")):
            damaged = f"checkpoint {directory.parent} is damaged: {path.name}"
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{damaged}: {error}") from None
            for key in file.keys():  # noqa: SIM118 (not a dict)
                piece = file.get_slice(key)
                if piece.get_dtype() not in _DTYPES:
                    raise ValueError(f"{damaged}: {key!a} has a dtype that is none of ours, {piece.get_dtype()}")
                if key in self.entries:
                    raise ValueError(f"{damaged}: {key!a} stands in another file, too")
                self.entries[key] = Entry(tuple(piece.get_shape()), _DTYPES[piece.get_dtype()])
                self._files[key] = file
        try:
            check_entries({key: entry.shape for key, entry in self.entries.items()}, layout)
        except ValueError as error:
            raise ValueError(f"checkpoint {directory.parent} is damaged: {error}") from None

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        entry, file = self.entries[key], self._files[key]
        stop = entry.numel if stop is None else stop
        if start == 0 and stop == entry.numel:
            return file.get_tensor(key).flatten()
        row = math.prod(entry.shape[1:])
        first = start // row
        rows = file.get_slice(key)[first : -(-stop // row)].flatten()
        return rows[start - first * row : stop - first * row]


def write_portable(state: FullState, directory: Path, *, max_file_bytes: int) -> None:
    """Writes everything in `state`, one tensor in memory at a time.

    directory: is made. max_file_bytes: a file is closed before it would pass this; a larger tensor has a file
    of its own.
    """
    directory.mkdir(parents=True)
    parts: list[dict[str, Entry]] = [{}]
    size = 0
    for key, entry in state.entries.items():
        nbytes = entry.numel * entry.dtype.itemsize
        if parts[-1] and size + nbytes > max_file_bytes:
            parts.append({})
            size = 0
        parts[-1][key] = entry
        size += nbytes
    for number, entries in enumerate(parts, start=1):
        _write_file(directory / f"state-{number:05d}.safetensors", entries, state)


def _write_file(path: Path, entries: Mapping[str, Entry], state: FullState) -> None:
    """A safetensors file, written as its tensors come; the library's own writer wants all of them in memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, entry in entries.items():
        begin, end = end, end + entry.numel * entry.dtype.itemsize
        header[key] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, entry in entries.items():
            file.write(_bytes(state.read(key), entry))
        file.flush()
        os.fsync(file.fileno())


def _bytes(flat: torch.Tensor, entry: Entry) -> memoryview:
    assert (flat.dtype, flat.numel()) == (entry.dtype, entry.numel), "a state reads what it says"
    return memoryview(flat.contiguous().view(torch.uint8).numpy())
