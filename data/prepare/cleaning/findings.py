"""What looking at a share of an input has found so far, in files, so that a look that was stopped goes on with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from matmix.data.artifacts import fits, parse_json
from matmix.data.prepare.base import Chunk, Position
from matmix.data.prepare.cleaning.duplicates import BANDS, ROWS
from matmix.data.storage.files import write_atomic

_COLUMNS = {"places": (np.int64, 4), "digests": (np.uint64, 2), "signatures": (np.uint32, BANDS * ROWS)}
_POSITION = {"source": int, "offset": int, "line": int}
_STATE = {"position": _POSITION, "documents": int, "sizes": dict, "is_entered": bool}
_BEGUN, _COMPLETE = "begun.json", "complete.json"

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
    """What was found from `start` up to `position`, in a folder. As a context it takes more; what was added after the
    last `save` is forgotten."""

    def __init__(self, folder: Path, start: Position) -> None:
        super().__init__()
        self.start, self._folder = start, folder
        self.position, self.documents, self._sizes = start, 0, dict.fromkeys(("broken", *_COLUMNS), 0)
        self.is_complete = self.is_entered = False
        """is_entered: True where lines are counted from the middle of a text on."""
        # Of its own, so that on a file system without locks no process that is slower takes it back.
        path = next(filter(Path.exists, (folder / _COMPLETE, folder / _BEGUN)), None)
        try:
            state = parse_json(path.read_bytes(), path) if path else {}
            sizes = state["sizes"] if fits(state, _STATE) else {}
            if sizes.keys() != self._sizes.keys() or any((folder / n).stat().st_size < sizes[n] for n in sizes):
                return
        except (OSError, ValueError, TypeError):
            return
        self.position, self.documents, self._sizes = Position(**state["position"]), state["documents"], sizes
        self.is_complete, self.is_entered = path.name == _COMPLETE, state["is_entered"]

    def __enter__(self) -> Findings:
        self._files = {}
        for name, size in self._sizes.items():
            (self._folder / name).touch()
            file = self._files[name] = self.enter_context(open(self._folder / name, "r+b"))
            file.seek(size)  # what stands behind comes again, the same
        return self

    def add(self, chunk: Chunk, found: Examined) -> None:
        """Adds a chunk, which begins at `position`."""
        if self.position == self.start:
            self.is_entered = chunk.start.offset > 0 and chunk.start.line == 1  # of a table, the line is the row
        for one in found.broken:
            self._files["broken"].write(json.dumps(one).encode() + b"\n")
        for name in _COLUMNS:
            self._files[name].write(getattr(found, name).tobytes())
        self.documents += len(found.broken) + len(found.places)
        self.position = chunk.end

    def save(self, *, is_complete: bool = False) -> None:
        """Brings to the disk what was added."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._sizes = {name: file.tell() for name, file in self._files.items()}
        self.is_complete = is_complete
        state = {"position": asdict(self.position), "sizes": self._sizes}
        state |= {"documents": self.documents, "is_entered": self.is_entered}
        write_atomic(self._folder / (_COMPLETE if is_complete else _BEGUN), json.dumps(state), alone=False)

    def column(self, name: str) -> np.ndarray:
        """Returns what was saved of a column, (n, width), mapped read-only."""
        dtype, width = _COLUMNS[name]
        if not self._sizes[name]:
            return np.zeros((0, width), dtype)
        rows = self._sizes[name] // (np.dtype(dtype).itemsize * width)
        return np.memmap(self._folder / name, dtype, mode="r", shape=(rows, width))

    def broken(self) -> Iterator[tuple[str, Place, str]]:
        """Yields the documents that a rule removes."""
        with open(self._folder / "broken", "rb") as file:
            while file.tell() < self._sizes["broken"]:
                yield json.loads(file.readline())


def lines_before(shares: Sequence[Findings]) -> list[int]:
    """Returns for each of consecutive shares the lines of its first source that earlier ones have counted."""
    found, so_far = [], 0
    for share in shares:
        found.append(so_far if share.is_entered else 0)
        # An empty share passes on what it got.
        same = share.position.source == share.start.source
        so_far = (
            share.position.line - 1 + (so_far if same and (share.is_entered or share.position == share.start) else 0)
        )
    return found
