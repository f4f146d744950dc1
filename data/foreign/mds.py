"""MDS shards that others wrote, read by StreamingDataset.

It is given columns of bytes only, which are decoded here: texts as UTF-8, arrays of ids by the library's own codec once
their encoding was looked at. Directories with pickled columns are refused. Any sample of a shard is read at once, so a
drawn order is a permutation of the shard.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.artifacts import artifact_name, one_line
from matmix.data.config import DataConfig
from matmix.data.foreign.shards import LABELS, PICTURES, Shards, Value
from matmix.data.foreign.streaming import streaming_dataset
from matmix.data.formats.mds import mds_codec
from matmix.data.prepare.text.mds import INDEX, Entry, read_index
from matmix.data.storage.files import write_atomic
from matmix.data.storage.private import private_folder
from matmix.data.storage.remote import first_line, is_url
from matmix.data.storage.storage import cache_root, read_small

_IDS = re.compile(r"ndarray:(u?int(?:8|16|32)|int64)(?::[1-9][0-9]{0,8})?")
_TEXTS = ("str", "bytes")
_NUMBERS, _NUMBER = ("int", "str", "str_int"), re.compile(r"u?int(8|16|32|64)")


class MdsShards(Shards):
    """Opened by all ranks together, as StreamingDataset is."""

    kind, need = "MDS shards", INDEX

    @staticmethod
    def find(place: str) -> bytes | None:
        """Returns index.json of a directory; None where there is none."""
        return read_small(place, INDEX)

    def __init__(self, path: str, index: bytes, data: DataConfig, split: str) -> None:
        folder = Path(path)
        packed = any(shard.get("compression") for shard in _listed(index))
        if is_url(path) or packed:
            # Else the library would unpack beside the files, and clear up among them.
            base = cache_root(path, is_url(path), data.cache_dir)
            if not data.cache_dir:
                private_folder(base, close=True)
            key = hashlib.sha256(b"\n".join([path.encode(), split.encode(), index])).hexdigest()
            folder = base / f"streaming-{key[:16]}"
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / INDEX, index, alone=False)
        entries = read_index(folder / INDEX)
        if not entries:
            raise ValueError(f"{path}/{INDEX} lists no MDS shards")
        names = [artifact_name(entry.raw, f"{path}/{INDEX}", nested=True) for entry in entries]
        super().__init__(path, names, hashlib.sha256(index).hexdigest())
        for entry in entries:
            if entry.packed is not None:
                artifact_name(entry.packed, f"{path}/{INDEX}", nested=True)
            if 4 * (entry.samples + 2) > entry.raw_bytes:
                raise ValueError(f"{path}/{INDEX} is damaged: {entry.raw} cannot hold {entry.samples:,} samples")
            stored = Path(path, entry.packed or entry.raw)
            if not is_url(path) and not (stored.is_file() or Path(path, entry.raw).is_file()):
                raise FileNotFoundError(f"{path} lacks the shard {one_line(stored.name)}, which its {INDEX} lists")
        self._counts = [entry.samples for entry in entries]
        self._first = list(itertools.accumulate(self._counts, initial=0))
        choose = self._pictures if data.images.path else functools.partial(self._text, data.text_field)
        self._decoders = [choose(entry) for entry in entries]
        own = (
            {}
            if folder == Path(path)
            else {"remote": path.removeprefix("file://"), "cache_limit": _limit(data, folder)}
        )
        self._dataset = streaming_dataset(path, str(folder), _hash(index) if own and data.verify else None, **own)
        for reader in self._dataset.shards:
            reader.column_encodings = ["bytes"] * len(reader.column_names)

    def values(self, shard: int, draw: np.random.Generator | None, start: int) -> Iterator[tuple[str, Value]]:
        count, decode = self._counts[shard], self._decoders[shard]
        order = np.arange(count) if draw is None else draw.permutation(count)
        for index in order[start:].tolist():
            where = f"{self.path}: sample {index} of {self.names[shard]}"
            try:
                value = decode(self._dataset[self._first[shard] + index])
            except Exception as error:  # what random bytes make of the library, and its clients of a store
                raise ValueError(f"{where} cannot be read ({one_line(first_line(error))})") from None
            yield where, value

    def _column(self, entry: Entry, names: tuple[str, ...], fine: Callable[[str], object]) -> tuple[str, str]:
        """Returns the name and encoding of the first of these columns. Raises ValueError (one line)."""
        encodings = {name: encoding for name, encoding, _ in entry.columns}
        name = next((name for name in names if name in encodings), None)
        if name is None:
            known = one_line(", ".join(encodings))
            raise ValueError(f"{self.path} has no column {' or '.join(names)}; its columns are {known}")
        if not fine(encodings[name]):
            raise ValueError(f"{self.path}: the column {name} is {one_line(encodings[name])}, which is not read")
        return name, encodings[name]

    def _text(self, field: str, entry: Entry) -> Callable[[dict[str, bytes]], Value]:
        name, encoding = self._column(entry, (field,), lambda kind: kind in _TEXTS or _IDS.fullmatch(kind))
        if encoding in _TEXTS and (encoding, name) != ("bytes", "tokens"):
            return functools.partial(_decoded_text, name)
        return functools.partial(_decoded_ids, name, encoding)

    def _pictures(self, entry: Entry) -> Callable[[dict[str, bytes]], Value]:
        image, _ = self._column(entry, PICTURES, lambda kind: kind in ("bytes", "jpeg", "png"))
        label, kind = self._column(entry, LABELS, lambda kind: kind in _NUMBERS or _NUMBER.fullmatch(kind))
        return functools.partial(_decoded_picture, image, label, "int64" if kind == "int" else kind)


def _decoded_text(name: str, sample: dict[str, bytes]) -> Value:
    return sample[name].decode("utf-8")


def _decoded_ids(name: str, encoding: str, sample: dict[str, bytes]) -> Value:
    if encoding == "bytes":  # as llm-foundry writes them
        return np.frombuffer(sample[name], "<i8")
    return mds_codec().mds_decode(encoding, sample[name])


def _decoded_picture(image: str, label: str, kind: str, sample: dict[str, bytes]) -> Value:
    number = sample[label].decode("ascii") if kind.startswith("str") else np.frombuffer(sample[label], kind)[0]
    return sample[image], int(number)


def _listed(index: bytes) -> list[dict[str, Any]]:
    """Returns the shards of an index.json as far as it is one; what is wrong with it is said later."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        return [shard for shard in json.loads(index)["shards"] if isinstance(shard, dict)]
    return []


def _hash(index: bytes) -> str | None:
    """Returns the digest that all shards come with, the best of them; None where there is none."""
    known = [set(shard.get("hashes") or ()) for shard in _listed(index)]
    shared = set.intersection(*known) if known else set()
    return next((name for name in ("sha256", "sha1", "xxh128", "xxh64", "md5") if name in shared), None)


def _limit(data: DataConfig, folder: Path) -> int | None:
    if data.cache_bytes < 0:
        return None
    status = os.statvfs(folder)
    return data.cache_bytes or status.f_frsize * status.f_blocks // 2
