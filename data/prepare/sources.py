"""Which files an input argument means."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matmix.data.corpora import bundled_path

SUFFIXES: dict[str, Literal["txt", "jsonl", "parquet"]] = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".xz", ".zst")
_BLOCK = 1 << 16


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
            hashed.update(file.read(_BLOCK))
            file.seek(max(0, self.bytes - _BLOCK))
            hashed.update(file.read(_BLOCK))
        return hashed.hexdigest()


def find_sources(inputs: Sequence[str]) -> tuple[list[Source], list[str]]:
    """Files named by paths, folders (with their subfolders), globs and `bundled:NAME`.

    They come in a fixed order, that of the arguments and sorted within each, without repetition. The second
    list holds the files of folders and globs that were passed over for their suffix.

    Raises FileNotFoundError for a path or pattern without a file, ValueError for a suffix that cannot be
    read.
    """
    sources: dict[str, Source] = {}
    ignored: list[str] = []
    for item in inputs:
        for path in _expand(item, ignored):
            kind, compression = _kind_of(path)
            assert kind is not None
            name = item if item.startswith("bundled:") else str(path)
            source = Source(name, str(path), kind, compression, path.stat().st_size)
            sources.setdefault(str(path.resolve()), source)
    return list(sources.values()), ignored


def _expand(item: str, ignored: list[str]) -> list[Path]:
    if item.startswith("bundled:"):
        return [bundled_path(item.removeprefix("bundled:"))]
    path = Path(item).expanduser()
    if path.is_file():
        if _kind_of(path)[0] is None:
            raise ValueError(f"{path} has a suffix that cannot be read; {_readable()}")
        return [path]
    if path.is_dir():
        candidates = [path]
    elif path.exists():
        raise ValueError(f"{path} is neither a file nor a folder")
    elif glob.has_magic(item):
        candidates = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        if not candidates:
            raise FileNotFoundError(f"no file matches the pattern {item}")
    else:
        raise FileNotFoundError(f"data path {path} does not exist")
    files: list[Path] = []
    for candidate in candidates:
        files += _walk(candidate) if candidate.is_dir() else [candidate]
    readable = [file for file in files if _kind_of(file)[0] is not None]
    ignored += [str(file) for file in files if _kind_of(file)[0] is None]
    if not readable:
        raise ValueError(f"{item} holds no file that can be read; {_readable()}")
    return readable


def _walk(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent) / name for name in files if not name.startswith(".")]
    return sorted(found)


def _kind_of(path: Path) -> tuple[Literal["txt", "jsonl", "parquet"] | None, str]:
    suffix, compression = path.suffix.lower(), ""
    if suffix in COMPRESSIONS:
        compression, suffix = suffix, Path(path.stem).suffix.lower()
    kind = SUFFIXES.get(suffix)
    return (None, "") if kind == "parquet" and compression else (kind, compression)


def _readable() -> str:
    return "give .txt or .jsonl files (also .gz, .xz, .zst) or .parquet files"
