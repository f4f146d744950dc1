"""WebDataset: tar files with a member `<number>.npy` for each document, or for each picture `<number>.jpg` (.png,
.webp, ...) and `<number>.cls`, the number of its class in digits.

An uncompressed shard is read by webdataset as it is, a compressed one through a pipe, as Python's tarfile knows no zstd
before 3.14: ``WebDataset("pipe:zstd -dc DIR/train/shard-00000.tar.zst")``. The library reads such files from front to
back only. Here the 512-byte member headers are walked once, and documents are views into the memory map.
"""

import io
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.formats import base
from matmix.data.formats.base import LABEL_BYTES, PICTURES, OpenShard, ShardFormat, ShardInfo, damaged

_BLOCK = 512
_REGULAR = (b"0", b"\0")
_MAGIC = b"\x93NUMPY"


class WebDataset(ShardFormat):
    """Members are arrays (n,) that numpy.save wrote, numbered through the split (with a `prefix`: a part of it)."""

    suffix = ".tar"
    shard_overhead = 2 * _BLOCK

    def file_name(self, shard: int) -> str:
        return f"shard-{shard:05}.tar"

    def document_bytes(self, tokens: int) -> int:
        if self.dtype == PICTURES:
            return _BLOCK + -(-(tokens - LABEL_BYTES) // _BLOCK) * _BLOCK + 2 * _BLOCK
        # numpy pads its header to a multiple of 64; for one axis and these types it is 128 bytes.
        content = 128 + tokens * self.dtype.itemsize
        return _BLOCK + -(-content // _BLOCK) * _BLOCK

    def encode(self, documents: list[np.ndarray], first: int) -> bytes:
        from webdataset import TarWriter  # imports torch, for which only preparing this format is to wait

        buffer = io.BytesIO()
        # Time 0 and no owner: the bytes depend on the documents only.
        fixed: dict[str, Any] = {"mtime": 0, "user": "", "group": "", "mode": 0o644}
        with TarWriter(buffer, encoder=False, **fixed) as tar:
            for number, document in enumerate(documents, start=first):
                for suffix, content in self._members(document):  # one at a time: else it sorts them by suffix
                    tar.write({"__key__": f"{self.prefix}{number:010}", suffix: content})
        return buffer.getvalue()

    def _members(self, document: np.ndarray) -> list[tuple[str, bytes | memoryview]]:
        """Returns suffix and bytes of each member of a document."""
        if self.dtype == PICTURES:
            picture, label = base.unpack(document)
            return [(base.suffix_of(picture), picture), ("cls", str(label).encode())]
        content = io.BytesIO()
        np.save(content, document, allow_pickle=False)
        return [("npy", content.getbuffer())]

    @classmethod
    def open_shard(cls, path: Path, shard: ShardInfo, *, dtype: str, where: str, index: Any = None) -> OpenShard:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if path.stat().st_size else b""
        if np.dtype(dtype) == PICTURES:
            members, wanted = _members(data, where, b""), 2 * shard.documents
            if len(members) != wanted:
                raise damaged(where, f"it holds {len(members)} files instead of {wanted}, 2 for each picture")
            return _TarPictures(data, members, dtype, where)
        members = _members(data, where, _MAGIC)
        if len(members) != shard.documents:
            raise damaged(where, f"it holds {len(members)} documents instead of {shard.documents}")
        return _TarShard(data, members, dtype, where)


def _members(data: memoryview, where: str, magic: bytes) -> np.ndarray:
    """Returns int64 (n, 2): first byte and last byte + 1 of each regular member that begins with `magic`."""
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
        if header[156:157] in _REGULAR and data[begin : begin + len(magic)] == magic:
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
        self._data, self._members, self._where = data, members, where
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._descr = repr(self._dtype.str).encode()

    def read(self, index: int, length: int) -> np.ndarray:
        # The npy format (NEP 1): magic, version, uint16 length of a header that spells dtype and order; data.
        begin, end = self._members[index].tolist()
        head = self._data[begin : min(begin + 128, end)].tobytes()
        start = 10 + int.from_bytes(head[8:10], "little")
        right = head[:7] == _MAGIC + b"\x01" and self._descr in head and b"'fortran_order': False" in head
        if not right or end - begin - start != length * self._dtype.itemsize:
            raise damaged(self._where, f"document {index} is not an npy array of {length} {self._dtype.name} tokens")
        return np.frombuffer(self._data, self._dtype, length, offset=begin + start)


class _TarPictures(_TarShard):
    def read(self, index: int, length: int) -> np.ndarray:
        (begin, end), (first, last) = self._members[2 * index : 2 * index + 2].tolist()
        digits = self._data[first : min(last, first + 20)].tobytes()
        if end - begin + LABEL_BYTES != length or last - first > 18 or not digits.isdigit():
            raise damaged(self._where, f"document {index} is not a picture of {length - LABEL_BYTES} bytes and a label")
        return base.pack(self._data[begin:end].tobytes(), int(digits))
