"""Directories of MDS shards that others wrote with mosaicml-streaming: any column of strings or bytes.

Of a sample only the wanted columns are decoded, by the library's codec of strings or bytes: pickles and pictures in
other columns are passed over unread.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from matmix.data.artifacts import artifact_name, fits, one_line, read_json
from matmix.data.formats.base import LARGEST_SHARD, damaged
from matmix.data.formats.mds import mds_codec
from matmix.data.prepare.text.compressed import DECODERS, open_text
from matmix.data.prepare.text.documents import strings_in
from matmix.data.prepare.text.sources import Rows

INDEX = "index.json"
_SUFFIXES = {"zstd": ".zst", "gz": ".gz"}
_TEXTS = ("str", "bytes")
_FILE = {"basename": str, "bytes": int}
_SHARD = {"column_names": [str], "column_encodings": [str], "column_sizes": list, "samples": int, "raw_data": _FILE}


class Entry(NamedTuple):
    """A shard in index.json."""

    columns: tuple[tuple[str, str, int | None], ...]
    """Name, encoding and size of each; None: it has a size of its own in each sample."""
    samples: int
    raw: str
    raw_bytes: int
    packed: str | None
    compression: str | None


class MdsShard(Rows):
    """A shard of an MDS directory, as it is or compressed."""

    def _entry(self) -> Entry:
        """Returns what index.json says of the shard. Raises ValueError (one line) where it lists no such file."""
        path = Path(self.path)
        for folder in path.parents[:2]:  # the index of several directories lies above them
            index = folder / INDEX
            if index.is_file():
                stat = index.stat()
                entries = _read_index(index, stat.st_mtime_ns, stat.st_size) or {}
                if (entry := entries.get(path.relative_to(folder).as_posix())) is not None:
                    return entry
        raise ValueError(f"{self.name} stands in no {INDEX} beside it, which MDS shards need: give the whole directory")

    @property
    def end(self) -> int:
        return self._entry().samples

    def portions(self, start: int, stop: int) -> Iterator[list[tuple[Any, ...]]]:
        entry = self._entry()
        encodings = {name: encoding for name, encoding, _ in entry.columns}
        for name in self.options.fields:
            if name not in encodings:
                raise self.unknown_column(name, encodings)
            if encodings[name] not in _TEXTS:
                raise self.no_text(name, encodings[name], (n for n, kind in encodings.items() if kind in _TEXTS))
        with self._open(entry) as data:
            yield from self.gathered(self._samples(data, entry, start, stop, self.options.fields), start)

    def texts(self) -> Iterator[str]:
        entry = self._entry()
        names = [name for name, encoding, _ in entry.columns if encoding in _TEXTS]
        with self._open(entry) as data:
            for values in self._samples(data, entry, 0, entry.samples, names):
                yield from strings_in([v.decode("utf-8", "ignore") if isinstance(v, bytes) else v for v in values])

    @contextmanager
    def _open(self, entry: Entry) -> Iterator[memoryview]:
        """Opens the shard without compression."""
        if self.path.endswith(entry.raw):
            with open(self.path, "rb") as file:
                yield memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.bytes else b"")
            return
        suffix = _SUFFIXES.get((entry.compression or "").partition(":")[0], "")
        if suffix not in DECODERS:
            raise ValueError(
                f"{self.name} is compressed by {one_line(entry.compression)!r}, and {' and '.join(_SUFFIXES)} are "
                "read: decompress it first"
            )
        with open_text(self.path, suffix, 0, self.name) as (stream, _):
            data = stream.read(entry.raw_bytes + 1)  # no more, whatever a small file makes of itself
        if len(data) != entry.raw_bytes:
            raise damaged(self.name, f"without compression it has not the {entry.raw_bytes:,} bytes of its index")
        yield memoryview(data)

    def _samples(
        self, data: memoryview, entry: Entry, start: int, stop: int, wanted: Sequence[str]
    ) -> Iterator[tuple[Any, ...]]:
        # uint32 count, uint32 offsets[count + 1], the configuration as JSON, then the samples one after another.
        if len(data) < 4 * (entry.samples + 2) or int.from_bytes(data[:4], "little") != entry.samples:
            raise damaged(self.name, f"it does not begin with its {entry.samples:,} samples")
        offsets = np.frombuffer(data, "<u4", entry.samples + 1, offset=4)
        for row in range(start, stop):
            begin, end = offsets[row : row + 2].tolist()
            try:
                if not begin <= end <= len(data):
                    raise ValueError("its place is out of the file")
                yield self._values(data[begin:end], entry, wanted)
            except ValueError as error:
                raise damaged(self.name, f"sample {row + 1} does not decode ({one_line(error)})") from None

    def _values(self, sample: memoryview, entry: Entry, wanted: Sequence[str]) -> tuple[Any, ...]:
        """Returns the wanted columns of a sample: the sizes of those that have none, then all columns in order."""
        own = sum(1 for *_, size in entry.columns if not size)
        sizes = iter(np.frombuffer(sample, "<u4", own).tolist())
        values, at = {}, 4 * own
        for name, encoding, size in entry.columns:
            length = size or next(sizes)
            if at + length > len(sample):
                raise ValueError(f"column {name!r} ends behind it")
            if name in wanted:
                raw = bytes(sample[at : at + length])
                try:
                    values[name] = mds_codec().mds_decode(encoding, raw)
                except UnicodeDecodeError:
                    values[name] = raw  # a malformed record, which is counted later
            at += length
        return tuple(values[name] for name in wanted)


def read_index(path: Path) -> list[Entry] | None:
    """Returns the shards of an index.json in order; None where it is none of MDS. Raises ValueError (one line) for a
    damaged one, OSError."""
    stat = path.stat()
    entries = _read_index(path, stat.st_mtime_ns, stat.st_size)
    return None if entries is None else list(dict.fromkeys(entries.values()))


@functools.lru_cache(maxsize=8)
def _read_index(path: Path, changed: int, size: int) -> dict[str, Entry] | None:
    """Returns name of a file -> shard of an index.json, in order; None where it is none of MDS. changed, size: tell
    versions of it apart."""
    try:
        shards = read_json(path)["shards"]
        if not shards or any(shard["format"] != "mds" for shard in shards):
            return None
    except (ValueError, KeyError, TypeError):
        return None  # some other index.json
    entries = (_checked(shard, path) for shard in shards)
    return {name: entry for entry in entries for name in (entry.raw, entry.packed) if name is not None}


def _checked(shard: dict[str, Any], path: Path) -> Entry:
    zipped, problem = shard.get("zip_data"), ""
    if shard.get("version") != 2:
        problem = f"version {one_line(shard.get('version'))} is not known, only 2"
    elif not fits(shard, _SHARD) or not (zipped is None or fits(zipped, _FILE)):
        problem = "a shard lacks a key, or a value is of another kind"
    elif len({len(shard[key]) for key in ("column_names", "column_encodings", "column_sizes")}) > 1:
        problem = "the columns of a shard have not one name, encoding and size each"
    elif not all(size is None or fits(size, int) for size in shard["column_sizes"]):
        problem = "the size of a column is no number"
    elif not isinstance(shard.get("compression"), str | None):
        problem = "the compression of a shard is no name"
    elif shard["raw_data"]["bytes"] > LARGEST_SHARD:
        problem = "a shard is larger than shards of MDS can be"
    if problem:
        raise ValueError(f"{path} is damaged, or of a newer version of mosaicml-streaming: {problem}")
    columns = zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True)
    raw = shard["raw_data"]
    packed = zipped["basename"] if zipped else None
    return Entry(tuple(columns), shard["samples"], raw["basename"], raw["bytes"], packed, shard.get("compression"))


def mds_files(folder: Path) -> Sequence[Path] | None:
    """Returns the shards of an MDS directory, in order; None for another folder. Raises ValueError (one line) for a
    damaged index, FileNotFoundError for a shard that is missing."""
    if not (index := folder / INDEX).is_file():
        return None
    entries = read_index(index)
    return None if entries is None else [_file_of(folder, entry) for entry in entries]


def _file_of(folder: Path, entry: Entry) -> Path:
    names = [name for name in (entry.raw, entry.packed) if name is not None]
    paths = [folder / artifact_name(name, folder / INDEX, nested=True) for name in names]
    if (found := next((path for path in paths if path.is_file()), None)) is None:
        raise FileNotFoundError(
            f"{folder} lacks the shard {' or '.join(map(one_line, names))}, which its {INDEX} lists"
        )
    return found
