"""Tar files that others wrote, read by stages of webdataset.

The members that are asked for are read, and no decoder runs. To begin at a later sample the file is read through what
comes before; a drawn order is that of webdataset's buffer of `BUFFER` samples.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from matmix.data.artifacts import one_line
from matmix.data.config import DataConfig
from matmix.data.foreign.shards import LABELS, PICTURES, Shards, Value
from matmix.data.prepare.base import braces
from matmix.data.prepare.streams import is_stream
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.documents import text_of_sample
from matmix.data.prepare.text.tars import TarFile
from matmix.data.storage.remote import RemoteFolder, first_line, is_url

BUFFER = 1000


class _Members(ReadOptions):
    """Pictures and their classes."""

    fields = (*PICTURES, *LABELS)


class TarShards(Shards):
    """WebDataset's tar files, local or at a URL, plain or (local) .tar.gz and .tar.zst."""

    kind, need = "tar files", "a folder of .tar files, or names with {000..099}"

    @staticmethod
    def find(place: str) -> list[str] | None:
        """Returns the paths or URLs of the tar files that a folder has, or that a path with lists in braces names."""
        if ".tar" in place or "{" in place:
            return braces(place)
        if is_url(place):
            names = sorted(name for name in RemoteFolder(place).sizes() if name.endswith(".tar") and "/" not in name)
            return [f"{place.rstrip('/')}/{name}" for name in names] or None
        return sorted(str(path) for path in Path(place).glob("*.tar*") if _compression(path.name) is not None) or None

    def __init__(self, path: str, files: list[str], data: DataConfig, split: str) -> None:
        self._pictures = bool(data.images.path)
        self._options = _Members() if self._pictures else ReadOptions(text_field=data.text_field)
        self._files: list[TarFile] = []
        known = []
        for file in files:
            if not is_stream(file) and not Path(file).is_file():
                raise FileNotFoundError(f"{file} does not exist")
            name = file.rpartition("/")[2]
            if (compression := _compression(name)) is None or (compression and is_url(file)):
                raise ValueError(f"{file}: .tar files are read, and of this machine also .tar.gz, .tar.xz and .tar.zst")
            size = 0 if is_stream(file) else Path(file).stat().st_size
            known.append([name, size])
            self._files.append(TarFile(file, file, size, self._options, compression))
        super().__init__(path, [name for name, _ in known], hashlib.sha256(json.dumps(known).encode()).hexdigest())

    def values(self, shard: int, draw: np.random.Generator | None, start: int) -> Iterator[tuple[str, Value]]:
        from webdataset import DataPipeline, filters

        file, stages = self._files[shard], []
        if draw is not None:
            stages = [filters.shuffle(BUFFER, rng=random.Random(int(draw.integers(1 << 63))))]
        first = 0 if stages else start
        pipeline = DataPipeline(functools.partial(file.samples, first, None), *stages)
        for _, (key, members) in itertools.islice(pipeline, start - first, None):
            where = f"{file.name}: sample {one_line(key)}"
            yield where, self._picture(where, members) if self._pictures else self._text(where, key, members)

    def _text(self, where: str, key: str, members: dict[str, bytes]) -> Value:
        if self._options.text_field in members and self._options.text_field.endswith("npy"):
            try:
                return np.lib.format.read_array(io.BytesIO(members[self._options.text_field]), allow_pickle=False)
            except Exception as error:  # what random bytes make of numpy
                raise ValueError(f"{where} is no array ({one_line(first_line(error))})") from None
        text = text_of_sample(key, members, self._options, 0)
        if not isinstance(text, str):
            raise ValueError(f"{where}: {one_line(text.reason)}")
        return text

    def _picture(self, where: str, members: dict[str, bytes]) -> Value:
        picture = next((members[name] for name in PICTURES if members.get(name)), None)
        digits = next((members[name] for name in LABELS if name in members), b"").strip()
        if picture is None or not digits.isdigit() or len(digits) > 18:
            has = one_line(", ".join(members)) or "nothing"
            raise ValueError(
                f"{where} lacks a picture (.jpg, .png, ...) or the number of its class (.cls): it has {has}"
            )
        return picture, int(digits)


def _compression(name: str) -> str | None:
    """Returns the suffix of the compression of a tar file, "" without; None for another file."""
    match = re.search(r"\.tar(\.gz|\.xz|\.zst|)$", name)
    return None if match is None else match[1]
