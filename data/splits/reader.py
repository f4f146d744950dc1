"""Reads the documents of a prepared split by shard and index, in any order.

    shards = open_dataset("prepared/shakespeare", "train")
    shards.lengths(0)   # tokens of each document of the first shard
    shards.read(0, 7)   # tokens of its eighth document

Reading is random access into memory-mapped files, whose pages all processes of a machine share. Documents are numbered
inside their shard in the order of writing; `lengths.npy` holds their lengths in that order over all shards of the
split, which makes every sequence addressable without reading a shard.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from matmix.data.arrays import read_vector
from matmix.data.formats import FORMATS, format_of
from matmix.data.formats.base import DamagedShard, OpenShard
from matmix.data.splits.libraries import FORMAT_OF, OpenByStreaming, open_by_webdataset
from matmix.data.storage.cache import hold_shard, make_room
from matmix.data.storage.storage import Storage


def open_dataset(
    path: str, split: str = "train", *, cache_dir: str = "", tokenizer_sha256: str | None = None, **options: Any
) -> TokenShards:
    """Opens one split of a prepared dataset of text, at a folder or URL. cache_dir: of downloaded and decompressed
    shards. tokenizer_sha256: refuse shards made with another tokenizer. options: those of `TokenShards`. Raises
    FileNotFoundError if files are missing, ValueError if something is damaged or does not fit."""
    storage = Storage(path, cache_dir)
    manifest = storage.manifest
    if manifest.tokenizer is None:
        raise ValueError(f"{path} holds pictures, not text; name it as data.images.path")
    storage.file(manifest.tokenizer.file)  # raises where it is missing or another one
    if tokenizer_sha256 is not None and tokenizer_sha256 != manifest.tokenizer.sha256:
        raise ValueError(
            f"{path} was prepared with another tokenizer (SHA-256 {manifest.tokenizer.sha256[:12]}) than "
            f"this run uses ({tokenizer_sha256[:12]}); choose another --run-dir for a run on this data, or prepare the "
            "data with this run's tokenizer (--tokenizer RUN/tokenizer)"
        )
    return TokenShards(storage, split, **options)


def open_split(path: str, split: str = "train", *, cache_dir: str = "", **options: Any) -> TokenShards:
    """Opens one split of a dataset of any kind. options: those of `TokenShards`. Raises as `open_dataset`."""
    return TokenShards(Storage(path, cache_dir), split, **options)


class TokenShards:
    """The documents of one split of a prepared dataset. Each process opens shards when it first needs them.

    verify: check SHA-256 of the shards. keep_open: number of shards held open at once. skip_damaged: missing and
    damaged shards are no error until one is read. cache_bytes: size that the folder of downloaded and decompressed
    shards is kept to, 0 = half of its disk, -1 = any.
    """

    def __init__(
        self,
        storage: Storage,
        split: str,
        *,
        verify: bool = True,
        keep_open: int = 64,
        skip_damaged: bool = False,
        cache_bytes: int = 0,
    ) -> None:
        self.storage, self.split, self.manifest = storage, split, storage.manifest
        if split not in self.manifest.splits:
            known = ", ".join(self.manifest.splits) or "none"
            raise ValueError(f"{storage.path} has no split {split!r}; it has: {known}")
        self.format, self.info = format_of(self.manifest.format), self.manifest.splits[split]
        # What lies elsewhere is always compared, so that whoever wrote the index had the contents of what it names.
        self.verify, self.keep_open = verify or self.manifest.folder is not None, keep_open
        self.skip_damaged, self.cache_bytes = skip_damaged, cache_bytes
        self.reader = "addressable"
        self.n_shards = len(self.info.shards)
        self.shard_documents = np.array([s.documents for s in self.info.shards], dtype=np.int64)
        self._first = np.cumsum(self.shard_documents) - self.shard_documents
        self._lengths_path = storage.file(f"{split}/lengths.npy") if self.info.shards else None
        self._damaged: dict[int, str] = {}
        self.__setstate__({})
        for number, shard in enumerate(self.info.shards):
            with self._remembering_damage(number):
                storage.check_shard(split, shard)
            lengths = self.lengths(number)
            if len(lengths) != shard.documents or int(lengths.sum(dtype=np.int64)) != shard.tokens:
                raise ValueError(
                    f"{storage.path}: {split}/lengths.npy does not agree with the manifest at shard {shard.file}; "
                    "prepare the data again"
                )
        if self._damaged and len(self._damaged) == self.n_shards:
            raise ValueError(f"no shard of {storage.path}/{split} can be used: {self._damaged[0]}")

    def lengths(self, shard: int) -> np.ndarray:
        """Returns uint32 (documents,): tokens of each document of a shard, without special tokens."""
        if self._lengths is None:
            assert self._lengths_path is not None
            where = f"{self.storage.path}: {self.split}/lengths.npy"
            self._lengths = read_vector(self._lengths_path, "uint32", where)
        first = int(self._first[shard])
        return self._lengths[first : first + int(self.shard_documents[shard])]

    def streams(self, count: int, reader: str) -> list[TokenShards]:
        """Returns the split in so many parts: stream s has every count-th shard from s on, to be read one shard after
        another by the library `reader`. Raises ValueError where it reads other shards, or there are too few."""
        where = f"the {self.split} split of {self.storage.path}"
        if self.manifest.format != FORMAT_OF[reader]:
            raise ValueError(
                f'data.reader = "{reader}" reads shards of the format {FORMAT_OF[reader]}, but {where} has '
                f'{self.manifest.format}; set data.reader = "addressable"'
            )
        if self.n_shards < count:
            raise ValueError(
                f'data.reader = "{reader}" gives each of {count} reading processes shards of its own, but {where} has '
                f"{self.n_shards}; take fewer data.workers, or prepare the data with a smaller --shard-megabytes"
            )
        storage = copy.copy(self.storage)
        storage.by_streaming = reader == "streaming"
        parts = []
        for number in range(count):
            part, own = copy.copy(self), slice(number, None, count)
            part.storage, part.reader, part.keep_open = storage, reader, 2
            part.info = dataclasses.replace(self.info, shards=self.info.shards[own])
            part.n_shards = len(part.info.shards)
            part.shard_documents, part._first = self.shard_documents[own], self._first[own]
            parts.append(part)
        return parts

    def read(self, shard: int, index: int) -> np.ndarray:
        """Returns one document (n,) of the dataset's dtype, not to be written to. Raises as `opened`."""
        return self.opened(shard).read(index, int(self.lengths(shard)[index]))

    def opened(self, shard: int) -> OpenShard:
        """Returns a shard that is open. Raises FileNotFoundError or (with `skip_damaged` always) DamagedShard if it is
        missing or damaged, others if it cannot be fetched."""
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            # Before the next is fetched: a closed shard may make room for it in the cache.
            if len(self._open) >= self.keep_open:
                self._open.popitem(last=False)
            with self._remembering_damage(shard):
                if shard not in self._damaged:
                    self._open[shard] = self._open_shard(shard)
            if shard in self._damaged:
                raise DamagedShard(self._where(shard), self._damaged[shard].removeprefix(self._where(shard) + " "))
        return self._open[shard]

    def _open_shard(self, number: int) -> OpenShard:
        shard, where = self.info.shards[number], self._where(number)
        verify = self.verify and number not in self._verified
        if self.reader == "webdataset":
            return open_by_webdataset(self.storage, self.split, shard, verify=self.verify, where=where)
        if self.format.reads_index and self._index is None:
            self._index = self.format.read_index(self.storage.file(f"{self.split}/index.json"), where)
        index = self._starts_of(number) if self.format.reads_starts else self._index
        fetch = partial(self.storage.shard, self.split, shard, verify=verify)
        before = self.storage.published
        path, hold = hold_shard(self.storage.cache, fetch)
        if hold is not None and not (self._verified and before == self.storage.published):
            suffixes = [known.suffix for known in {*FORMATS.values(), self.format}]
            make_room(self.storage.cache.parent, self.cache_bytes, suffixes)
        self._verified.add(number)
        opened = self.format.open_shard(path, shard, dtype=self.manifest.dtype, where=where, index=index)
        if self.reader == "streaming":  # of which it reads what has been checked by now
            opened = OpenByStreaming(path, self._index[path.name], self.manifest.dtype, where)
        opened.hold = hold
        return opened

    def _starts_of(self, shard: int) -> np.ndarray:
        """Returns int64 (documents,): the first byte of each document of a shard in the shard's file."""
        if self._index is None:
            name = f"{self.split}/starts.npy"
            self._index = read_vector(self.storage.file(name), "int64", f"{self.storage.path}: {name}")
        first = int(self._first[shard])
        return self._index[first : first + int(self.shard_documents[shard])]

    def _where(self, number: int) -> str:
        return f"{self.storage.path}: {self.info.shards[number].called(self.split)}"

    @contextmanager
    def _remembering_damage(self, number: int) -> Iterator[None]:
        """Notes a missing or damaged shard, with `skip_damaged`, in place of raising its error now."""
        try:
            yield
        except (DamagedShard, FileNotFoundError) as error:
            # Where the dataset as a whole has gone, as with a folder that is no longer mounted, nothing is skipped.
            if not self.skip_damaged or not self.storage.is_there():
                raise
            self._damaged[number] = str(error)

    def __getstate__(self) -> dict:
        # A pickled memory map would carry its contents along: leave what a process can open again.
        return {name: value for name, value in self.__dict__.items() if name not in _OPENED}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._lengths: np.ndarray | None = None
        self._index: Any = None
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._verified: set[int] = set()


# What each process opens for itself.
_OPENED = ("_lengths", "_index", "_open", "_verified")
