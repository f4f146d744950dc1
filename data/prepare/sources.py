"""Input files: which an argument means, how one is opened, and what is read from it at a time."""

from __future__ import annotations

import glob
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zstandard

from matmix.data.artifacts import check_utf8
from matmix.data.corpora import bundled_path

SUFFIXES: dict[str, Literal["txt", "jsonl", "parquet"]] = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_DIGESTED = 1 << 16
_BLOCK = 1 << 20
# At once, of compressed bytes: one of zstd makes up to 32 KiB, of .xz some 7, of gzip 1, so this bounds the memory.
_COMPRESSED_BLOCK = 1 << 11
# For the window of a file, the largest that `zstd --long=31` and `xz --lzma2=dict=1536MiB` ask for (`xz -9e` needs 65
# MiB). Pages of it that hold no text yet take no memory.
_WINDOW_MEMORY = 1 << 31


@dataclass(frozen=True, slots=True)
class Source:
    """One input file."""

    name: str
    """What to call it in messages and in the manifest."""
    path: str
    kind: Literal["txt", "jsonl", "parquet"]
    compression: str
    """"" or the suffix .gz, .xz, .zst."""
    bytes: int
    """Size on the disk."""

    def digest(self) -> str:
        """Digest of the size and of the first and last 64 KiB: tells versions of a file apart without reading
        it.
        """
        hashed = hashlib.sha256(str(self.bytes).encode())
        with open(self.path, "rb") as file:
            hashed.update(file.read(_DIGESTED))
            file.seek(max(0, self.bytes - _DIGESTED))
            hashed.update(file.read(_DIGESTED))
        return hashed.hexdigest()

    @contextmanager
    def open(self, offset: int = 0) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
        """(the text, from a byte offset of it on; the file itself, which is compressed where the source is).

        Raises ValueError (one line) where reading it meets damage.
        """
        try:
            with open(self.path, "rb") as raw:
                yield _decompressed(raw, self.compression, offset), raw
        except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            kind = self.compression.removeprefix(".")
            raise ValueError(f"{self.name} is damaged, or no {kind} file: {error}") from error


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next record begins."""

    source: int = 0
    offset: int = 0
    """Bytes of the decompressed file, or rows of a .parquet file, before it."""
    line: int = 1
    """Its line, or its row, counted from 1."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of a source: raw bytes that adjoin in the file, or values of a column."""

    source: Source
    start: Position
    end: Position
    disk_bytes: int
    """How much of the file was read up to here (for progress)."""
    records: list[bytes] | list[object]


def find_sources(inputs: Sequence[str]) -> tuple[list[Source], list[str]]:
    """Files named by paths, folders (with their subfolders), globs and `bundled:NAME`.

    They come in a fixed order, that of the arguments and sorted within each, without repetition. The second
    list holds the files of folders and globs that were passed over for their suffix.

    Raises FileNotFoundError for a path or pattern without a file, ValueError for a suffix that cannot be
    read and a name that is no UTF-8.
    """
    sources: dict[str, Source] = {}
    ignored: list[str] = []
    for item in inputs:
        kinds = {path: _kind_of(path) for path in _expand(item)}
        ignored += [str(path) for path, kind in kinds.items() if kind is None]
        if not any(kinds.values()):
            is_file = Path(item).expanduser().is_file()
            what = "has a suffix that cannot be read" if is_file else "holds no file that can be read"
            raise ValueError(f"{item} {what}; give .txt or .jsonl files (also .gz, .xz, .zst) or .parquet files")
        for path, kind in kinds.items():
            if kind is not None:
                check_utf8(str(path), "the file name {}", "rename it")
                name = item if item.startswith("bundled:") else str(path)
                sources.setdefault(str(path.resolve()), Source(name, str(path), *kind, path.stat().st_size))
    return list(sources.values()), ignored


def _expand(item: str) -> list[Path]:
    """All files that an argument means, whatever their suffix."""
    if item.startswith("bundled:"):
        return [bundled_path(item.removeprefix("bundled:"))]
    if "://" in item:
        raise ValueError(f"{item} is a URL, and prepare reads files of this machine: download it first")
    path = Path(item).expanduser()
    candidates = [path]
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is neither a file nor a folder")
    if not path.exists():
        if not glob.has_magic(item):
            raise FileNotFoundError(f"data path {path} does not exist")
        if not (candidates := sorted(Path(p) for p in glob.glob(str(path), recursive=True))):
            raise FileNotFoundError(f"no file matches the pattern {item}")
    return [file for found in candidates for file in (_walk(found) if found.is_dir() else [found])]


def _walk(folder: Path) -> list[Path]:
    """Files in a folder and its subfolders, none of them hidden."""
    paths = (folder / name for name in glob.glob("**", root_dir=folder, recursive=True))
    return sorted(path for path in paths if not path.is_dir())


def _kind_of(path: Path) -> tuple[Literal["txt", "jsonl", "parquet"], str] | None:
    """Kind and compression of a file by its name; None where it cannot be read."""
    suffix, compression = path.suffix.lower(), ""
    if suffix in _DECODERS:
        compression, suffix = suffix, Path(path.stem).suffix.lower()
    kind = SUFFIXES.get(suffix)
    return None if kind is None or (kind == "parquet" and compression) else (kind, compression)


def _decompressed(raw: io.BufferedReader, compression: str, offset: int) -> io.BufferedReader:
    if not compression:
        raw.seek(offset)
        return raw
    stream = io.BufferedReader(_Frames(raw, compression), _BLOCK)
    while offset > 0:
        skipped = len(stream.read(min(offset, _BLOCK)))
        if not skipped:
            raise EOFError("it is shorter than before")
        offset -= skipped
    return stream


_DECODERS: dict[str, tuple[Callable[[], Any], bytes]] = {
    ".gz": (lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), b"\0"),
    ".xz": (lambda: lzma.LZMADecompressor(memlimit=_WINDOW_MEMORY), b"\0"),
    ".zst": (lambda: zstandard.ZstdDecompressor(max_window_size=_WINDOW_MEMORY).decompressobj(), b""),
}
"""Suffix -> what decompresses one frame, and the bytes that may stand between frames."""


class _Frames(io.RawIOBase):
    """Compressed frames in a row, with a bound on the memory, which the reader of lzma lacks; one that ends early is an
    error, which the reader of zstandard lacks."""

    def __init__(self, raw: io.BufferedReader, compression: str) -> None:
        self._raw, (self._new, self._padding) = raw, _DECODERS[compression]
        # An empty file is an empty text of gzip and zstd, but damaged .xz.
        self._decoder = self._new() if compression == ".xz" else None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(_COMPRESSED_BLOCK)
            if not self._input:
                if self._decoder is not None:
                    raise EOFError("the file ends inside a compressed frame")
                return 0
            if self._decoder is None:
                self._input = self._input.lstrip(self._padding)
                if not self._input:
                    continue
                self._decoder = self._new()
            self._output = self._decoder.decompress(self._input)
            self._input = b""
            if self._decoder.eof:
                self._input, self._decoder = self._decoder.unused_data, None
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size
