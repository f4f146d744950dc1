"""The base class of shard formats, which lay the documents of a shard out in a file and read that file again.

A document is an array of one axis: tokens, or (where the dtype is uint8) a picture, which is the bytes of its file,
then the number of its class as int64 (little-endian); its length counts both. MDS lays out a sample in the same way.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from matmix.data.artifacts import artifact_name, is_count, is_digest, require

LARGEST_SHARD = (1 << 32) - 1
"""Bytes of a shard without compression: offsets inside an MDS shard are 32-bit, and no format is given more."""

PICTURES = np.dtype("uint8")
LABEL_BYTES = 8
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_KINDS = {_JPEG: "jpg", _PNG: "png", b"GIF8": "gif", b"BM": "bmp", b"II*\0": "tif", b"MM\0*": "tif"}
# Most bytes beside the tokens: in a document (headers of the tar member with its long name, and of the array; offset
# and size in MDS), and in a shard (the end of a tar file, the configuration in MDS).
_DOCUMENT_OVERHEAD = 4096
_SHARD_OVERHEAD = 1 << 20


def pack(picture: bytes, label: int) -> np.ndarray:
    """Returns the document of an encoded picture and its class, uint8 (n,)."""
    return np.frombuffer(picture + int(label).to_bytes(LABEL_BYTES, "little", signed=True), PICTURES)


def unpack(document: np.ndarray) -> tuple[memoryview, int]:
    """Returns the encoded picture and its class. document: uint8 (n,), n >= 8."""
    data = memoryview(np.ascontiguousarray(document)).cast("B")
    return data[:-LABEL_BYTES], int.from_bytes(data[-LABEL_BYTES:], "little", signed=True)


def suffix_of(picture: bytes | memoryview) -> str:
    """Returns the suffix of a file with these bytes, without a dot; "img" where it is none of the usual kinds."""
    head = bytes(picture[:12])
    if head[:4] == b"RIFF" and head[8:] == b"WEBP":
        return "webp"
    return next((suffix for magic, suffix in _KINDS.items() if head.startswith(magic)), "img")


class DamagedShard(ValueError):
    """The bytes of a shard, which `where` names, are not what the manifest promises. A full disk or no network are
    other errors."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} {why}")
        self.where = where

    def __reduce__(self) -> tuple:
        return DamagedShard, (self.where, str(self)[len(self.where) + 1 :])


def damaged(where: str, why: str) -> DamagedShard:
    """Returns the error for a shard whose contents are not what the index promises."""
    return DamagedShard(where, f"is damaged: {why}; fetch or prepare the data again")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """A shard file in the manifest."""

    file: str
    """File name inside the split's folder, with the suffix of its compression."""
    documents: int
    tokens: int
    bytes: int
    """Size of the file as it lies on the disk."""
    sha256: str
    """Hex digest of the file as it lies on the disk."""
    raw_bytes: int
    """Size without compression."""
    raw_sha256: str
    """Hex digest of the shard without compression."""

    def place(self, split: str) -> tuple[str, int, int]:
        """Returns its file's path in the dataset, the offset of its first byte there, and the size of the file."""
        return f"{split}/{self.file}", 0, self.bytes

    def called(self, split: str) -> str:
        """Returns what it is called in messages."""
        return f"shard {split}/{self.file}"

    def check(self, where: str) -> None:
        """Raises ValueError or TypeError for a shard that no preparation writes. where: names it in the message."""
        artifact_name(self.file, "it")
        for name in ("documents", "tokens", "bytes", "raw_bytes"):
            require(is_count(getattr(self, name)), f"{where}.{name}", getattr(self, name))
        require(self.raw_bytes <= LARGEST_SHARD, f"{where}.raw_bytes", self.raw_bytes)
        for name in ("sha256", "raw_sha256"):
            require(is_digest(getattr(self, name)), f"{where}.{name}", getattr(self, name))

    def largest_raw_size(self, dtype: str) -> int:
        """Returns how many bytes its documents and tokens can take without compression."""
        size = self.tokens * np.dtype(dtype).itemsize + self.documents * _DOCUMENT_OVERHEAD + _SHARD_OVERHEAD
        return min(size, LARGEST_SHARD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch(ShardInfo):
    """A shard that is a stretch of a file which others have written. `file` is its path in the dataset, `bytes` and
    `sha256` are the stretch's; splits may share it."""

    offset: int
    """First byte of the stretch in the file."""
    file_bytes: int
    """Size of the file."""

    def place(self, split: str) -> tuple[str, int, int]:
        return self.file, self.offset, self.file_bytes

    def called(self, split: str) -> str:
        return f"{self.file} from byte {self.offset:,}"

    def check(self, where: str) -> None:
        artifact_name(self.file, "it", nested=True)
        ShardInfo.check(replace(self, file="_"), where)
        for name in ("offset", "file_bytes"):
            require(is_count(getattr(self, name)), f"{where}.{name}", getattr(self, name))
        inside = 0 < self.bytes == self.raw_bytes <= self.file_bytes - self.offset
        require(inside and self.raw_sha256 == self.sha256, f"{where}.bytes", self.bytes)


class OpenShard(ABC):
    """One shard file, open for random access."""

    hold: object | None = None
    """A lock that keeps a cached file from being removed while it is open."""

    @abstractmethod
    def read(self, index: int, length: int) -> np.ndarray:
        """Returns document `index`: a view or array (length,) of the dataset's dtype."""


class ReadFormat(ABC):
    """Opens the files that documents lie in."""

    reads_index: ClassVar[bool] = False
    """True where shards can only be opened with the split's index.json."""
    reads_starts: ClassVar[bool] = False
    """True where its index is starts.npy, of which `open_shard` gets the entries of the shard's documents, int64."""

    @classmethod
    def read_index(cls, path: Path, where: str) -> Any:
        """Returns what `open_shard` needs of the split's index.json, once in a process, if `reads_index`. where: names
        the shard in errors. Raises ValueError if the file is damaged."""
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def open_shard(cls, path: Path, shard: ShardInfo, *, dtype: str, where: str, index: Any) -> OpenShard:
        """Opens the uncompressed shard at `path`. where: names it in errors. index: of `read_index`, or None. Raises
        ValueError (`damaged`) if it does not hold the promised documents; nothing in it may be unpickled or run."""


class ShardFormat(ReadFormat):
    """Lays documents out in a file (an instance), opens such a file (the class), and describes the files of a split in
    its index.json. Numbering, compression, digests, downloads and the cache are the same for all formats."""

    suffix: ClassVar[str]
    """End of a shard's file name before the compression's suffix, such as ".mds". It tells shards from other files in a
    cache."""
    compressed_suffix: ClassVar[str] = ".zst"
    """End of the file name of a shard that is compressed with zstd."""

    def __init__(self, *, dtype: str, compression: Literal["zstd"] | None, size_limit: int, prefix: str = "") -> None:
        """size_limit: bytes of a shard before compression. prefix: of the names of documents, where they have names."""
        self.dtype = np.dtype(dtype)
        self.compression = compression
        self.size_limit = size_limit
        self.prefix = prefix

    @property
    def shard_overhead(self) -> int:
        """Bytes of an empty shard."""
        return 0

    @abstractmethod
    def file_name(self, shard: int) -> str:
        """Returns the name of a shard before compression, which ends with `suffix`."""

    def packed_name(self, shard: int) -> str:
        """Returns the name of a shard on the disk."""
        return self.file_name(shard) + (self.compressed_suffix if self.compression else "")

    @abstractmethod
    def document_bytes(self, tokens: int) -> int:
        """Returns how many bytes a document of so many elements adds to a shard at most."""

    @abstractmethod
    def encode(self, documents: list[np.ndarray], first: int) -> bytes:
        """Returns the bytes of a shard. documents: each (n,) of `self.dtype`; first: the first's number."""

    def raw_name(self, shard: ShardInfo) -> str:
        """Returns the name of a shard before compression."""
        return shard.file.removesuffix(self.compressed_suffix)

    def index(self, shards: Sequence[ShardInfo]) -> dict[str, Any]:
        """Returns the contents of the split's index.json."""
        return {"version": 1, "shards": [{**asdict(shard), "raw_file": self.raw_name(shard)} for shard in shards]}
