"""The base class of sources of pictures: what is in one, and how some of it is read."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from matmix.data.images.decode import UnreadablePicture
from matmix.data.prepare.sources import Position
from matmix.data.rng import INPUT_ORDER, generator

SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm"})
"""Of files that are pictures, in lower case."""
Label = int | str


@dataclass(frozen=True, slots=True)
class Item:
    """One picture of a source."""

    name: str
    """What to call it in messages."""
    label: Label
    """As the source has it."""
    where: Any
    """What the source needs to read it."""


class Source(ABC):
    """Pictures that are read one after another. Reading processes get a copy that can only `read`."""

    names: tuple[str, ...] | None = None
    """Classes in the order of the labels, where the source states them."""
    shuffled: ClassVar[bool] = True
    """Whether the pictures are taken in a random order, always the same one: sources often have one class after
    another, and training mixes only what is near in the shards."""
    chunk: ClassVar[int] = 64
    """Pictures that are read at once."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        # What `read` needs: it goes to a process with every chunk, and the list of all pictures would be large.
        return {name: value for name, value in self.__dict__.items() if name not in ("listed", "table")}

    @property
    def bytes(self) -> int:
        """Size on the disk."""
        return self.path.stat().st_size

    def digest(self) -> str:
        """Tells versions of the source apart without reading all of it."""
        hashed = hashlib.sha256(str(self.bytes).encode())
        with self.path.open("rb") as file:
            hashed.update(file.read(1 << 16))
            file.seek(max(0, self.bytes - (1 << 16)))
            hashed.update(file.read(1 << 16))
        return hashed.hexdigest()

    def labels(self) -> Iterator[Label]:
        """All labels, to find the classes."""
        for item in self.items():
            yield item.label

    @abstractmethod
    def items(self) -> Sequence[Item]:
        """The pictures in a fixed order. Raises ValueError (one line) for what cannot be used."""

    @abstractmethod
    def read(self, items: Sequence[Item]) -> Iterator[bytes | UnreadablePicture]:
        """The bytes of the files of consecutive items, or why there are none."""

    def ordered(self) -> list[Item]:
        """The pictures in the order in which they are prepared."""
        items = self.items()
        if not self.shuffled:
            return list(items)
        return [items[place] for place in generator(0, 0, INPUT_ORDER, 0).permutation(len(items))]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive pictures of a source, with the numbers of their classes."""

    source: Source
    items: list[Item]
    labels: np.ndarray
    """int64 (n,)."""
    validation: bool | None
    """Whether all belong to the validation split; None = a hash of each decides."""
    start: Position
    end: Position
    done: float
    """Share of the source that has been read after it."""
