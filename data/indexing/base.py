"""The base class of layouts, which say where the documents of a file with tokens lie."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from matmix.data.formats.in_place import DTYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where the documents of a file lie, in the order of the file."""

    dtype: np.dtype
    starts: np.ndarray
    """int64 (documents,): first byte of each in the file."""
    lengths: np.ndarray
    """int64 (documents,): tokens of each."""


@dataclass(frozen=True, kw_only=True)
class Layout(abc.ABC):
    """Finds documents. end: the id that ends a document; None = none does. dtype: of the ids where the file does not
    say it, "" = what is usual. vocab_size: number of ids."""

    end: int | None
    dtype: str
    vocab_size: int

    suffixes: ClassVar[Sequence[str]]
    """Ends of the names of the files that hold tokens."""

    @abc.abstractmethod
    def places(self, path: Path) -> Places:
        """Returns where the documents of a file lie, empty ones included. Raises FileNotFoundError and ValueError (one
        line that begins with the file) for a file that is damaged or of another layout."""

    def files(self, path: Path) -> Sequence[Path]:
        """Returns the file at `path`, and those that say what lies in it. Raises FileNotFoundError (one line)."""
        return [path]


def ids_dtype(name: str, path: Path) -> np.dtype:
    """Returns the dtype of the ids in a file. Raises ValueError for what is none."""
    if name not in DTYPES:
        raise ValueError(f"{path} holds {name}, which is none of the dtypes of token ids: {', '.join(DTYPES)}")
    return np.dtype(name).newbyteorder("<")


def mapped(path: Path) -> memoryview:
    """Returns the bytes of a file, read when they are looked at."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
