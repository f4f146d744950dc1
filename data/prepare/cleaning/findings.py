"""What a pass over an input has found so far, in files, so that a pass that was stopped goes on with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from matmix.data.artifacts import fits, parse_json
from matmix.data.prepare.base import Position
from matmix.data.prepare.cleaning.duplicates import BANDS, ROWS
from matmix.data.storage.files import write_atomic

_COLUMNS = {"places": (np.int64, 4), "digests": (np.uint64, 2), "signatures": (np.uint32, BANDS * ROWS)}
_STATE = {"position": {"source": int, "offset": int, "line": int}, "documents": int, "sizes": dict}

Place = tuple[int, int, int, int]
"""Source, offset of the record, number of the document in it, line."""


class Examined(NamedTuple):
    """The documents of a chunk: those that a rule removes, and what others are compared by."""

    broken: list[tuple[str, Place, str]]
    """Rule, place, beginning of the text."""
    places: np.ndarray
    """int64 (n, 4)."""
    digests: np.ndarray
    """uint64 (n, 2)."""
    signatures: np.ndarray
    """uint32 (n, BANDS * ROWS); (0, ...) where nobody asks for them."""


class Findings(ExitStack):
    """What was found up to `position`, in a folder; what was added after the last `save` is forgotten."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._state = folder, folder / "state.json"
        self.position, self.documents = Position(), 0
        sizes, self._files = self._restore(), {}
        for name in ("broken", *_COLUMNS):
            (folder / name).touch()
            file = self._files[name] = self.enter_context(open(folder / name, "r+b"))  # noqa: SIM115
            file.truncate(sizes.get(name, 0))
            file.seek(0, os.SEEK_END)

    def _restore(self) -> dict[str, int]:
        """Takes over the last state, and returns the sizes of the files in it; without a whole one, {}."""
        try:
            state = parse_json(self._state.read_bytes(), self._state)
            sizes = state["sizes"] if fits(state, _STATE) else {}
            if not sizes or any((self._folder / name).stat().st_size < size for name, size in sizes.items()):
                return {}
        except (OSError, ValueError, TypeError):
            return {}
        self.position, self.documents = Position(**state["position"]), state["documents"]
        return sizes

    def add(self, end: Position, found: Examined) -> None:
        """Adds a chunk, which ends at a position."""
        for one in found.broken:
            self._files["broken"].write(json.dumps(one).encode() + b"\n")
        for name in _COLUMNS:
            self._files[name].write(getattr(found, name).tobytes())
        self.documents += len(found.broken) + len(found.places)
        self.position = end

    def save(self) -> None:
        """Brings to the disk what was added."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        state = {"position": asdict(self.position), "documents": self.documents, "sizes": sizes}
        write_atomic(self._state, json.dumps(state))

    def column(self, name: str) -> np.ndarray:
        """Returns what was added of a column, (n, width), mapped read-only."""
        self._files[name].flush()
        dtype, width = _COLUMNS[name]
        if not self._files[name].tell():
            return np.zeros((0, width), dtype)
        return np.memmap(self._folder / name, dtype, mode="r").reshape(-1, width)

    def broken(self) -> Iterator[tuple[str, Place, str]]:
        """Yields the documents that a rule removes."""
        self._files["broken"].flush()
        with open(self._folder / "broken", "rb") as lines:
            yield from map(json.loads, lines)
