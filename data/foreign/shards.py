"""What shards of directories that others made are to the reader of rows, and what all kinds of them share.

A file chooses no decoder: texts are UTF-8, arrays of ids are read without pickle, pictures decoded where all pictures
are. A shard is read from its beginning, or from any of its samples on, in its own order or in a drawn one.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator

import numpy as np

Value = str | np.ndarray | tuple[bytes, int]
"""A text, the ids of one, or an encoded picture with the number of its class."""

PICTURES = ("image", "jpg", "jpeg", "png", "webp", "img")
LABELS = ("cls", "class", "label")
"""Names of columns and members that hold a picture, and the number of its class; the first that is there counts."""


class Shards(abc.ABC):
    """Shards of texts, or of pictures. names: of the shards; digest: of what is known of them beforehand."""

    def __init__(self, path: str, names: list[str], digest: str) -> None:
        self.path, self.names, self.digest = path, names, digest

    @abc.abstractmethod
    def values(self, shard: int, draw: np.random.Generator | None, start: int) -> Iterator[tuple[str, Value]]:
        """Yields the samples of a shard, each with words for where it is, from number `start` of its order on. draw:
        draws the order; None = that of the file. Raises ValueError, OSError (one line) for what cannot be read."""
