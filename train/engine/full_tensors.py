"""The form of checkpoints that every engine reads at any number of ranks: full tensors in safetensors files.

    STEP/portable/weights-00001.safetensors, weights-00002 ...    weights and persistent buffers
    STEP/portable/moments-00001.safetensors, moments-00002 ...    what the optimizer keeps of each updated parameter

Each file stands alone; which one holds a tensor does not matter.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from matmix.data.storage.files import open_durable
from matmix.train.engine.full_state import MODEL, CheckpointFiles, Entry, FullState, check_entries

KIND = SUBDIRECTORY = "portable"
_WEIGHTS, _MOMENTS = "weights", "moments"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorFiles(FullState):
    """Tensors in .safetensors files, of which only the rows that are asked for are read."""

    def __init__(self, paths: Iterable[Path], damaged: str) -> None:
        """damaged: the beginning of errors. Raises ValueError (one line) for an unknown format or a tensor twice."""
        self.entries: dict[str, Entry] = {}
        self._files = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{damaged}: {path.name}: {error}") from None
            for key in file.keys():  # noqa: SIM118 (not a dict)
                piece = file.get_slice(key)
                if (dtype := piece.get_dtype()) not in _DTYPES:
                    raise ValueError(f"{damaged}: {path.name}: {key!a} has an unknown dtype, {dtype}")
                if key in self.entries:
                    raise ValueError(f"{damaged}: {path.name}: {key!a} stands in another file, too")
                self.entries[key] = Entry(tuple(piece.get_shape()), _DTYPES[dtype])
                self._files[key] = file

    def _read_rows(self, key: str, first: int, last: int) -> torch.Tensor:
        file = self._files[key]
        return file.get_slice(key)[first:last] if self.entries[key].shape else file.get_tensor(key)


class FullTensorFiles(TensorFiles, CheckpointFiles):
    """Reads what `write_full` wrote."""

    def __init__(self, checkpoint: Path, layout: Mapping[str, Any], *, weights_only: bool = False) -> None:
        layout = {**layout, "moments": {}} if weights_only else layout
        paths = sorted((checkpoint / SUBDIRECTORY).glob("*.safetensors"))
        wanted = [path for path in paths if not (weights_only and path.name.startswith(_MOMENTS))]
        super().__init__(wanted, f"checkpoint {checkpoint} is damaged")
        try:
            check_entries({key: entry.shape for key, entry in self.entries.items()}, layout)
        except ValueError as error:
            raise ValueError(f"checkpoint {checkpoint} is damaged: {error}") from None

    @staticmethod
    def weight_files(layout: Mapping[str, Any], files: Iterable[str]) -> list[str]:
        return [name for name in files if not name.startswith(f"{SUBDIRECTORY}/{_MOMENTS}")]


def write_full(state: FullState, directory: Path, *, max_file_bytes: int) -> None:
    """Writes everything in `state` into the new `directory`, one tensor in memory at a time. A file is closed before it
    would pass `max_file_bytes`; a larger tensor has a file of its own."""
    directory.mkdir(parents=True)
    for kind, is_of_kind in ((_WEIGHTS, True), (_MOMENTS, False)):
        parts: list[dict[str, Entry]] = [{}]
        size = 0
        for key, entry in state.entries.items():
            if key.startswith(MODEL) == is_of_kind:
                nbytes = entry.numel * entry.dtype.itemsize
                if parts[-1] and size + nbytes > max_file_bytes:
                    parts.append({})
                    size = 0
                parts[-1][key] = entry
                size += nbytes
        for number, entries in enumerate(filter(None, parts), start=1):
            _write_file(directory / f"{kind}-{number:05d}.safetensors", entries, state)


def _write_file(path: Path, entries: Mapping[str, Entry], state: FullState) -> None:
    """Writes a safetensors file as its tensors come; the library's own writer wants all of them in memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, entry in entries.items():
        begin, end = end, end + entry.numel * entry.dtype.itemsize
        header[key] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open_durable(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, entry in entries.items():
            flat = state.read(key)
            assert (flat.dtype, flat.numel()) == (entry.dtype, entry.numel), "a state reads what it says"
            file.write(memoryview(flat.contiguous().view(torch.uint8).numpy()))
