"""Finds the sources of text that arguments name: one table of readers, by the suffix of a file.

To add one, write its `TextSource` and add its suffix to `READERS`.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matmix.data.artifacts import check_utf8
from matmix.data.corpora import bundled_path
from matmix.data.prepare.base import paths_of
from matmix.data.prepare.streams import find_streams, is_stream
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.compressed import DECODERS
from matmix.data.prepare.text.hub import HUB, find_hub_files
from matmix.data.prepare.text.mds import MdsShard, mds_files
from matmix.data.prepare.text.sequences import FastaFile, FastqFile, RawFile
from matmix.data.prepare.text.sources import TextSource
from matmix.data.prepare.text.tables import ArrowFile, ParquetFile, arrow_files
from matmix.data.prepare.text.tars import TarFile
from matmix.data.prepare.text.texts import TextFile

_LINES = partial(TextFile, kind="jsonl")
_READS = partial(FastqFile, kind="fastq")
READERS: dict[str, Callable[..., TextSource]] = {
    ".txt": partial(TextFile, kind="txt"),
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".json": _LINES,
    ".parquet": ParquetFile,
    ".arrow": ArrowFile,
    ".mds": MdsShard,  # also with a suffix of its compression
    ".tar": partial(TarFile, compression=""),
    ".fa": partial(FastaFile),
    ".fna": partial(FastaFile),
    ".fasta": partial(FastaFile),
    ".fq": _READS,
    ".fastq": _READS,
}
"""Suffix of a file -> what reads it, of name, path, size and `ReadOptions`."""
_FIELDS = ".jsonl files, tables, MDS shards, tar files and the hub"
OF_SOME = {
    "text_field": _FIELDS,
    "template": _FIELDS,
    "text_documents": ".txt files",
    "document_separator": ".txt files",
    "intervals": "FASTA files",
}
"""Option -> which sources take it (`TextSource.takes`)."""
_FOLDERS: Sequence[Callable[[Path], list[Path] | None]] = (arrow_files, mds_files)
"""Each returns which files of a folder are read, where a library wrote it, and None for any other folder."""


def find_sources(inputs: Sequence[str], options: ReadOptions | None = None) -> tuple[list[TextSource], list[str]]:
    """Returns the files that paths, folders (with their subfolders), globs, URLs, `hub:NAME` and `bundled:NAME` name,
    without repetition, in the order of the arguments, and those of folders and globs that were passed over for their
    suffix.

    Raises FileNotFoundError for a path or pattern without a file, ValueError for a suffix that cannot be read and a
    name that is not UTF-8.
    """
    sources: dict[str, TextSource] = {}
    ignored: list[str] = []
    raw = options is not None and options.raw_bytes
    for item in inputs:
        if item.startswith(HUB):
            for file in find_hub_files(item, options or ReadOptions()):
                sources.setdefault(file.place, file)
            continue
        if is_stream(item):
            if raw:
                raise ValueError(f"{item}: --raw-bytes reads files of this machine: download it first")
            for url, size in find_streams(item):
                sources.setdefault(url, TarFile(url, url, size, options or ReadOptions()))
            continue
        before = len(ignored)
        paths = _expand(item, raw)
        for path in paths:
            if (make := RawFile if raw else _reader(path)) is None:
                ignored.append(str(path))
                continue
            check_utf8(str(path), "the file name {}", "rename it")
            name = item if item.startswith("bundled:") else str(path)
            source = make(name, str(path), path.stat().st_size, options or ReadOptions())
            sources.setdefault(str(path.resolve()), source)
        if len(ignored) - before == len(paths):
            is_file = Path(item).expanduser().is_file()
            what = "has a suffix that cannot be read" if is_file else "holds no file that can be read"
            raise ValueError(
                f"{item} {what}; give .txt or .jsonl files (also .gz, .xz, .zst), .parquet, .arrow, .mds, .tar, FASTA "
                "or FASTQ files"
            )
    return list(sources.values()), ignored


def check_options(sources: Sequence[TextSource], options: ReadOptions) -> None:
    """Raises ValueError (one line) for an option that was given and decides nothing: no source takes it, or another
    option stands in its way."""

    def given(name: str) -> bool:
        return getattr(options, name) != getattr(ReadOptions, name)

    for name, kinds in OF_SOME.items():
        if given(name) and not any(name in source.takes for source in sources):
            raise ValueError(f"prepare: --{name.replace('_', '-')} is for {kinds}, and no input is read as such")
    if given("template") and given("text_field"):
        raise ValueError("prepare: --template takes the place of --text-field: leave one of them out")
    if given("document_separator") and options.text_documents != "separator":
        raise ValueError("prepare: --document-separator is for --text-documents separator")


def _reader(path: Path) -> Callable[..., TextSource] | None:
    suffix = path.suffix.lower()
    if ".mds" in path.suffixes[-2:]:  # its index names the compression
        return MdsShard
    compression = suffix if suffix in DECODERS else ""
    make = READERS.get(Path(path.stem).suffix.lower() if compression else suffix)
    if isinstance(make, partial):
        return partial(make, compression=compression)
    return None if compression else make


def _expand(item: str, raw: bool) -> list[Path]:
    """Returns all files that an argument names, whatever their suffix. raw: of folders that a library wrote, too."""
    if item.startswith("bundled:"):
        return [bundled_path(item.removeprefix("bundled:"))]
    files: list[Path] = []
    for path in paths_of(item, "data path {} does not exist"):
        if path.is_dir():
            files += _below(path, raw)
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"{path} is neither a file nor a folder")
    return files


def _below(folder: Path, raw: bool) -> list[Path]:
    """Returns the files of a folder and its subfolders, without hidden ones, sorted; of a folder that a library wrote,
    those with data in the library's order."""
    for files_of in () if raw else _FOLDERS:
        if (files := files_of(folder)) is not None:
            return files
    names = sorted(glob.glob("*", root_dir=folder))
    paths = (folder / name for name in names)
    return [file for path in paths for file in (_below(path, raw) if path.is_dir() else [path])]
