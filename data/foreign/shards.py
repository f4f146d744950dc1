"""The shards of directories that others made: MDS read by StreamingDataset, tar files by stages of webdataset.

A file chooses no decoder. StreamingDataset is given columns of bytes only, which are decoded here: texts as UTF-8,
arrays of ids by the library's own codec once their encoding was looked at, pictures where all pictures are. Directories
with pickled columns are refused. Of tar files the members that are asked for are read, and no decoder runs.

Both read a shard from its beginning, or from any of its samples on: MDS at once, tar files by reading through what
comes before. The order within a shard is drawn: MDS has a permutation, tar files webdataset's buffer of `BUFFER`
samples.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import gc
import hashlib
import io
import itertools
import json
import os
import random
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from matmix.data.artifacts import artifact_name, one_line
from matmix.data.config import DataConfig
from matmix.data.formats.mds import mds_codec
from matmix.data.manifest import MANIFEST_NAME
from matmix.data.prepare.base import braces
from matmix.data.prepare.streams import is_stream
from matmix.data.prepare.text import ReadOptions
from matmix.data.prepare.text.documents import text_of_sample
from matmix.data.prepare.text.mds import INDEX, Entry, read_index
from matmix.data.prepare.text.tars import TarFile
from matmix.data.storage.files import write_atomic
from matmix.data.storage.private import private_folder
from matmix.data.storage.remote import RemoteFolder, first_line, is_url
from matmix.data.storage.storage import cache_root, download

Value = str | np.ndarray | tuple[bytes, int]
"""A text, the ids of one, or an encoded picture with the number of its class."""

BUFFER = 1000
_LARGEST_INDEX = 1 << 30
_PICTURES = ("image", "jpg", "jpeg", "png", "webp", "img")
_LABELS = ("cls", "class", "label")
_IDS = re.compile(r"ndarray:(u?int(?:8|16|32)|int64)(?::[1-9][0-9]{0,8})?")
_TEXTS = ("str", "bytes")
_NUMBERS, _NUMBER = ("int", "str", "str_int"), re.compile(r"u?int(8|16|32|64)")
_SPLITS = {"train": ("", "train"), "validation": ("validation", "val")}


class Shards(abc.ABC):
    """Shards of texts, or of pictures. names: of the shards; digest: of what is known of them beforehand."""

    def __init__(self, path: str, names: list[str], digest: str) -> None:
        self.path, self.names, self.digest = path, names, digest

    @abc.abstractmethod
    def values(self, shard: int, draw: np.random.Generator | None, start: int) -> Iterator[tuple[str, Value]]:
        """Yields the samples of a shard, each with words for where it is, from number `start` of its order on. draw:
        draws the order; None = that of the file. Raises ValueError, OSError (one line) for what cannot be read."""


def is_foreign(path: str, reader: str) -> bool:
    """Returns whether a path of the config leads to no prepared dataset. Raises as `download`."""
    if reader == "addressable" or not path:
        return False
    if path.startswith("pipe:"):
        raise ValueError("data.path: the command of a pipe is run by `matmix prepare` only; name files or a URL")
    if ".tar" in path or "{" in path:
        return True
    return _read(path, MANIFEST_NAME) is None


def open_shards(data: DataConfig, path: str, split: str) -> Shards:
    """Opens the shards of a split: in `path` itself or its folder `train`, or, unless `path` is the place named for
    validation, in its folder `validation` or `val`. Raises FileNotFoundError, ValueError, OSError (one line)."""
    config = data.images if data.images.path else data
    opener = MdsShards if data.reader == "streaming" else TarShards
    whole = split == "train" or path == config.validation_path
    folders = _SPLITS["train" if whole else "validation"]
    places = [path.rstrip("/") + f"/{folder}" if folder else path for folder in folders]
    if opener is TarShards and "{" in path:
        places = [path] if whole else []
    for place in places:
        if (found := opener.find(place)) is not None:
            return opener(place, found, data, split)
    table = "data.images" if data.images.path else "data"
    if not whole:
        raise ValueError(
            f"{path} has no folder {' or '.join(folders)} with {opener.kind}, to validate with: set "
            f"{table}.validation_path"
        )
    raise FileNotFoundError(f"{path} holds no {opener.kind}, which data.reader = {data.reader!r} reads ({opener.need})")


def _read(place: str, name: str) -> bytes | None:
    """Returns a small file of a folder or URL; None where there is none."""
    if not is_url(place):
        path = Path(place, name)
        return path.read_bytes() if path.is_file() else None
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(FileNotFoundError):
        download(f"{place.rstrip('/')}/{name}", target := Path(folder, name), _LARGEST_INDEX)
        return target.read_bytes()
    return None


# -- MDS -----------------------------------------------------------------------------------------------------------


class MdsShards(Shards):
    """Opened by all ranks together, as StreamingDataset is."""

    kind, need = "MDS shards", INDEX

    @staticmethod
    def find(place: str) -> bytes | None:
        """Returns index.json of a directory; None where there is none."""
        return _read(place, INDEX)

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
        self._dataset = _streaming_dataset(path, str(folder), _hash(index) if own and data.verify else None, **own)
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
        image, _ = self._column(entry, _PICTURES, lambda kind: kind in ("bytes", "jpeg", "png"))
        label, kind = self._column(entry, _LABELS, lambda kind: kind in _NUMBERS or _NUMBER.fullmatch(kind))
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


def _streaming_dataset(path: str, local: str, validate_hash: str | None, **options: Any) -> Any:
    """Returns the StreamingDataset of a directory, on all ranks together. Memory that it shares among them is named by
    numbers which all programs of a machine count up: they are given out one after another, and what a killed run left
    behind for the same folder is removed. Raises ValueError (one line) where the library refuses the directory."""
    from streaming import StreamingDataset  # 3 seconds
    from streaming.base.constant import SHM_TO_CLEAN

    gc.collect()  # what an earlier run of this process has left in cycles of references holds its folder
    with _meeting() as leads, contextlib.ExitStack() as stack:
        lock, problem = None, None
        if leads:
            name = f"matmix-streaming-{os.geteuid()}.lock"
            stack.enter_context(FileLock(Path(tempfile.gettempdir(), name)))
            if "remote" in options:
                lock = FileLock(Path(local, ".in-use"), timeout=0)
                try:
                    lock.acquire()
                except Timeout:
                    problem = f"another run of this machine reads {path} by way of {local}: set data.cache_dir"
                else:
                    _remove_stale(local, SHM_TO_CLEAN)
        if (problem := _told(problem)) is not None:
            if lock is not None:
                lock.release()
            raise ValueError(problem)
        try:
            dataset = StreamingDataset(
                local=local, validate_hash=validate_hash, shuffle=False, allow_unsafe_types=False, **options
            )
        except Exception as error:
            if lock is not None:
                lock.release()
            raise ValueError(f"{path} cannot be read by StreamingDataset: {one_line(first_line(error))}") from None
    shared = [dataset._locals_shm, *(part.shm for part in _arrays(dataset))]
    left = [dataset._cache_filelock_path, dataset._shared_barrier.filelock_path] if leads else []
    weakref.finalize(dataset, _clean_up, os.getpid(), shared, left, lock)
    return dataset


def _arrays(dataset: Any) -> list[Any]:
    scalars = [dataset._next_epoch.arr, dataset._cache_usage.arr]
    return [dataset._shared_barrier._arr, *scalars, dataset._shard_states, dataset._shard_access_times]


def _clean_up(process: int, shared: list[Any], files: list[str], lock: FileLock | None) -> None:
    """Removes what a StreamingDataset shared, once the process that made it is done with it."""
    if os.getpid() != process:
        return
    for memory in shared:
        with contextlib.suppress(OSError, BufferError):
            memory.cleanup()
        # The library does it again when the process ends, when another one may have memory of that name.
        memory.created_shms.clear()
    for file in files:
        Path(file).unlink(missing_ok=True)
    if lock is not None:
        lock.release()


def _remove_stale(local: str, names: list[str]) -> None:
    """Removes the shared memory that StreamingDatasets of a folder have left which nobody reads any more."""
    memory = Path("/dev/shm")
    for path in memory.glob("[0-9]*_locals"):
        with contextlib.suppress(OSError):
            if os.path.abspath(local).encode() in path.read_bytes()[4:].split(b"\0"):
                for name in names:
                    (memory / path.name.replace("locals", name)).unlink(missing_ok=True)


@contextlib.contextmanager
def _meeting() -> Iterator[bool]:
    """Tells the library by the environment who the ranks are; yields whether this one is its machine's first."""
    from torch import distributed

    alone = not (distributed.is_available() and distributed.is_initialized())
    rank, world = (0, 1) if alone else (distributed.get_rank(), distributed.get_world_size())
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or world) if not alone else 1
    told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "LOCAL_RANK": rank % local}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        yield rank % local == 0
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _told(problem: str | None) -> str | None:
    """Returns the problem of any rank, once all ranks are here."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return problem
    found: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, problem)
    return next(filter(None, found), None)


# -- tar files -----------------------------------------------------------------------------------------------------


class _Members(ReadOptions):
    """Pictures and their classes."""

    fields = (*_PICTURES, *_LABELS)


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
        picture = next((members[name] for name in _PICTURES if members.get(name)), None)
        digits = next((members[name] for name in _LABELS if name in members), b"").strip()
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
