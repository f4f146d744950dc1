"""What a format of shards is: how the documents of a shard are laid out in a file, and how that file is read again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from matmix.data.artifacts import artifact_name, is_count, is_digest, require

LARGEST_SHARD = (1 << 32) - 1
"""Bytes of a shard without compression: offsets inside an MDS shard are 32-bit, and no format is given more."""

# Bytes beside the tokens, at most: of a document (headers of the tar member with its long name, and of the array;
# offset and size in MDS), and of a shard (the end of a tar file, the configuration in MDS).
_DOCUMENT_OVERHEAD = 4096
_SHARD_OVERHEAD = 1 << 20


class DamagedShard(ValueError):
    """A shard whose bytes are not what the manifest promises; `where` names it.

    Errors that say nothing of the data (no network, a full disk) are of other kinds.
    """

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} {why}")
        self.where = where

    def __reduce__(self) -> tuple:
        return DamagedShard, (self.where, str(self)[len(self.where) + 1 :])


def damaged(where: str, why: str) -> DamagedShard:
    """The error for a shard whose contents are not what the index promises."""
    return DamagedShard(where, f"is damaged: {why}; fetch or prepare the data again")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """What the manifest says of a shard file."""

    file: str
    """File name inside the split's folder, with the suffix of its compression."""
    documents: int
    tokens: int
    bytes: int
    """Size of the file as it lies on the disk."""
    sha256: str
    """Hex digest of the file as it lies on the disk."""
    raw_bytes: int | None = None
    """Size without compression; None in older datasets."""
    raw_sha256: str | None = None
    """Hex digest of the shard without compression; None in older datasets."""

    def check(self, where: str) -> None:
        """Raises ValueError for a shard that no preparation writes. where: what to call it."""
        artifact_name(self.file, "it")
        for name in ("documents", "tokens", "bytes"):
            require(is_count(getattr(self, name)), f"{where}.{name}", getattr(self, name))
        require(is_digest(self.sha256), f"{where}.sha256", self.sha256)
        size, digest = self.raw_bytes, self.raw_sha256
        require(size is None or (is_count(size) and size <= LARGEST_SHARD), f"{where}.raw_bytes", size)
        require(digest is None or is_digest(digest), f"{where}.raw_sha256", digest)

    def largest_raw_size(self, dtype: str) -> int:
        """Bytes that the shard can have without compression, going by its documents and tokens."""
        size = self.tokens * np.dtype(dtype).itemsize + self.documents * _DOCUMENT_OVERHEAD + _SHARD_OVERHEAD
        return min(size, LARGEST_SHARD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard(ShardInfo):
    """A shard file as a preparation has written it."""

    raw_file: str
    """File name without the suffix of the compression."""

    @classmethod
    def checked(cls, raw: dict[str, Any]) -> Shard:
        """From what a file says. Raises ValueError, TypeError or AttributeError for what no preparation says."""
        shard = cls(**raw)
        shard.check("shard")
        artifact_name(shard.raw_file, "it")
        return shard

    @property
    def info(self) -> ShardInfo:
        """What the manifest says of it."""
        return ShardInfo(**{key: value for key, value in asdict(self).items() if key != "raw_file"})


class OpenShard(ABC):
    """One shard file, open for random access."""

    hold: object | None = None
    """Keeps a cached file from being removed while it is open."""

    @abstractmethod
    def read(self, index: int, length: int) -> np.ndarray:
        """Tokens of document `index`, a 1-D view or array of the dataset's dtype with `length` elements."""


class ShardFormat(ABC):
    """How documents are laid out in a file, and what the split's index.json says of the files.

    An instance writes; shards are opened by the class itself. Everything else (numbering, compression, digests,
    downloads, the cache) is the same for all formats.
    """

    suffix: ClassVar[str]
    """Of a shard's file name, before that of the compression, such as ".mds". In a cache it tells shards from other
    files."""
    compressed_suffix: ClassVar[str] = ".zst"
    """Appended to the file name by zstd."""
    reads_index: ClassVar[bool] = False
    """Whether shards can only be opened with the split's index.json."""

    def __init__(self, *, dtype: str, compression: Literal["zstd"] | None, size_limit: int, prefix: str = "") -> None:
        """size_limit: bytes of a shard before compression. prefix: what the names of documents begin with, in formats
        that name them."""
        self.dtype = np.dtype(dtype)
        self.compression = compression
        self.size_limit = size_limit
        self.prefix = prefix

    @property
    def shard_overhead(self) -> int:
        """Bytes of a shard without documents."""
        return 0

    @abstractmethod
    def file_name(self, shard: int) -> str:
        """Name of a shard before compression; it ends with `suffix`."""

    def packed_name(self, shard: int) -> str:
        """Name of a shard as it lies on the disk."""
        return self.file_name(shard) + (self.compressed_suffix if self.compression else "")

    @abstractmethod
    def document_bytes(self, tokens: int) -> int:
        """Bytes that a document of so many tokens adds to a shard, at most."""

    @abstractmethod
    def encode(self, documents: list[np.ndarray], first: int) -> bytes:
        """A shard of documents, each (n,) of `self.dtype`; `first`: number of the first in the split."""

    def index(self, shards: list[Shard]) -> dict[str, Any]:
        """Contents of the split's index.json."""
        return {"version": 1, "shards": [asdict(shard) for shard in shards]}

    @classmethod
    def read_index(cls, path: Path, where: str) -> Any:
        """What `open_shard` needs of the split's index.json; asked once in a process, if `reads_index`.

        where: the shard that is to be opened, for errors. Raises ValueError if the file is damaged.
        """
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def open_shard(cls, path: Path, shard: ShardInfo, *, dtype: str, where: str, index: Any) -> OpenShard:
        """Opens the uncompressed shard at `path`.

        where: names it in errors. index: what `read_index` gave, or None. Raises ValueError (`damaged`) if it does not
        hold the documents that the manifest promises; nothing in it may be unpickled or run.
        """
