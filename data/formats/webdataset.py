"""Shards in WebDataset form: a tar file with one `<key>.npy` member for each document.

The library reads such files from front to back only. Here the 512-byte member headers are walked once
when a shard is opened (the position of every member follows from the sizes before it), and documents are
then views into the memory map: random access, without unpacking and without any decoder that could
unpickle.
"""

import mmap
from pathlib import Path

import numpy as np

from matmix.data.formats.base import OpenShard
from matmix.data.manifest import ShardInfo
from matmix.data.storage.damaged_shard import damaged

_BLOCK = 512
_REGULAR = (b"0", b"\0")
_MAGIC = b"\x93NUMPY"


def open_shard(path: Path, shard: ShardInfo, *, dtype: str, where: str) -> OpenShard:
    """Opens the uncompressed tar at `path`.

    Raises ValueError if it is truncated or does not hold the documents that the manifest promises.
    """
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if path.stat().st_size else b""
    members = _token_members(data, where)
    if len(members) != shard.documents:
        raise damaged(where, f"it holds {len(members)} documents instead of {shard.documents}")
    return _TarShard(data, members, dtype, where)


def _token_members(data: memoryview, where: str) -> np.ndarray:
    """int64 (documents, 2): first and last byte + 1 of each .npy member, in the order of the file."""
    spans: list[tuple[int, int]] = []
    position = 0
    while position + _BLOCK <= len(data):
        header = data[position : position + _BLOCK].tobytes()
        if header[0] == 0:  # an empty block ends the archive
            break
        begin, size = position + _BLOCK, _member_size(header[124:136], where, position)
        if begin + size > len(data):
            raise damaged(where, "it ends inside a member: the file is truncated")
        # By content, not by name: long names stand in extra members before the one they belong to.
        if header[156:157] in _REGULAR and data[begin : begin + len(_MAGIC)] == _MAGIC:
            spans.append((begin, begin + size))
        position = begin + -(-size // _BLOCK) * _BLOCK
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


def _member_size(field: bytes, where: str, position: int) -> int:
    if field[0] & 0x80:  # GNU form of sizes above 8 GiB: big-endian binary
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    if digits.strip(b"01234567"):  # int() would take a sign, and the walk go backwards without an end
        raise damaged(where, f"there is no tar header at byte {position}")
    return int(digits or b"0", 8)


class _TarShard(OpenShard):
    def __init__(self, data: memoryview, members: np.ndarray, dtype: str, where: str) -> None:
        self._data = data
        self._members = members
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._descr = repr(self._dtype.str).encode()
        self._where = where

    def read(self, index: int, length: int) -> np.ndarray:
        # The npy format (NEP 1): magic, version, uint16 length of a header that spells dtype and order; data.
        begin, end = self._members[index].tolist()
        head = self._data[begin : min(begin + 128, end)].tobytes()
        start = 10 + int.from_bytes(head[8:10], "little")
        right = head[:7] == _MAGIC + b"\x01" and self._descr in head and b"'fortran_order': False" in head
        if not right or end - begin - start != length * self._dtype.itemsize:
            raise damaged(
                self._where,
                f"document {index} is not an npy array of {length} {self._dtype.name} tokens",
            )
        return np.frombuffer(self._data, self._dtype, length, offset=begin + start)
