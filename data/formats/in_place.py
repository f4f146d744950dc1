"""Tokens in files that others have written, read where they lie.

A shard is a stretch of such a file. `starts.npy` of a split holds the first byte of each document in its file, and
`lengths.npy` its tokens; what lies between documents, such as headers and end tokens, is passed over.
"""

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.formats.base import OpenShard, ReadFormat, Stretch, damaged

DTYPES = ("uint16", "uint32", "int32", "int64")
"""Dtypes of token ids, all little-endian."""


class InPlace(ReadFormat):
    """Documents are arrays of ids, each in one piece."""

    reads_starts = True

    @classmethod
    def open_shard(cls, path: Path, shard: Stretch, *, dtype: str, where: str, index: Any) -> OpenShard:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if path.stat().st_size else b""
        if len(data) != shard.file_bytes or len(index) != shard.documents:
            raise damaged(where, f"the file has {len(data):,} bytes, and {len(index):,} documents are known")
        return _OpenStretch(data, index, shard, dtype, where)


class _OpenStretch(OpenShard):
    def __init__(self, data: memoryview, starts: np.ndarray, shard: Stretch, dtype: str, where: str) -> None:
        self._data, self._starts, self._where = data, starts, where
        self._first, self._end = shard.offset, shard.offset + shard.bytes
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def read(self, index: int, length: int) -> np.ndarray:
        start = int(self._starts[index])
        if not self._first <= start <= start + length * self._dtype.itemsize <= self._end:
            raise damaged(self._where, f"document {index} does not lie in it")
        return np.frombuffer(self._data, self._dtype, length, offset=start)
