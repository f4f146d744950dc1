"""Finds the text files that an argument names, and opens them, decompressed."""

from __future__ import annotations

import glob
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
from matmix.data.prepare.base import Source, open_parquet

BOM = b"\xef\xbb\xbf"

SUFFIXES: dict[str, Literal["txt", "jsonl", "parquet"]] = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_BLOCK = 1 << 20
# Compressed bytes that are read at once. One of zstd makes up to 32 KiB, of .xz 7, of gzip 1: this bounds the memory.
_COMPRESSED_BLOCK = 1 << 11
# The largest window: `zstd --long=31` and `xz --lzma2=dict=1536MiB` ask for that (`xz -9e` needs 65 MiB). Its pages
# that hold no text yet take no memory.
_WINDOW_MEMORY = 1 << 31


@dataclass(frozen=True)
class TextFile(Source):
    """One input file."""

    name: str
    path: str
    kind: Literal["txt", "jsonl", "parquet"]
    compression: str
    """"" or the suffix .gz, .xz, .zst."""
    bytes: int

    @property
    def end(self) -> int | None:
        if self.kind == "parquet":
            with open_parquet(self.path, self.name) as file:
                return file.metadata.num_rows
        # A file of a byte order mark alone has no records.
        return None if self.compression or self.bytes <= len(BOM) else self.bytes

    @contextmanager
    def open(self, offset: int = 0) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
        """Opens the text, from a byte offset on, and the file on the disk, which may be compressed.

        Raises ValueError (one line) where reading it meets damage.
        """
        try:
            with open(self.path, "rb") as raw:
                yield _decompressed(raw, self.compression, offset), raw
        except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            kind = self.compression.removeprefix(".")
            raise ValueError(f"{self.name} is damaged, or no {kind} file: {error}") from error


def find_sources(inputs: Sequence[str]) -> tuple[list[TextFile], list[str]]:
    """Returns the files that paths, folders (with their subfolders), globs and `bundled:NAME` name, without repetition.

    They come in the order of the arguments, sorted within each. The second list holds the files of folders and globs
    that were passed over for their suffix. Raises FileNotFoundError for a path or pattern without a file, ValueError
    for a suffix that cannot be read and a name that is not UTF-8.
    """
    sources: dict[str, TextFile] = {}
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
                sources.setdefault(str(path.resolve()), TextFile(name, str(path), *kind, path.stat().st_size))
    return list(sources.values()), ignored


def _expand(item: str) -> list[Path]:
    """Returns all files that an argument names, whatever their suffix."""
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
    return [file for path in candidates for file in (_walk(path) if path.is_dir() else [path])]


def _walk(folder: Path) -> list[Path]:
    """Returns the files in a folder and its subfolders, without hidden ones."""
    paths = (folder / name for name in glob.glob("**", root_dir=folder, recursive=True))
    return sorted(path for path in paths if not path.is_dir())


def _kind_of(path: Path) -> tuple[Literal["txt", "jsonl", "parquet"], str] | None:
    """Returns kind and compression of a file by its name; None where it cannot be read."""
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
"""Suffix -> a function that makes the decompressor of one frame, and the bytes that may stand between frames."""


class _Frames(io.RawIOBase):
    """Reads compressed frames in a row. It bounds the memory, unlike the reader of lzma, and refuses a frame that ends
    early, unlike that of zstandard."""

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
