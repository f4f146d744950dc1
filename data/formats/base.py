"""The interface of prepared shards: token arrays of documents, by shard and index, in any order.

`TokenShards` is all that the layers above know of the storage; the formats differ only in how a shard
file is opened (`matmix.data.formats.mds`, `matmix.data.formats.webdataset`). Reading is random access
into memory-mapped files: the pages are shared by all processes of a machine, and a document costs no
more than a view.

Documents are numbered inside their shard in the order in which they were written; `lengths.npy` holds
their token counts in that order over all shards of the split, which makes every sequence addressable
without reading a shard.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from matmix.data.arrays import read_vector
from matmix.data.manifest import Manifest, SplitInfo
from matmix.data.storage.cache import Hold, hold_shard, make_room
from matmix.data.storage.damaged_shard import DamagedShard
from matmix.data.storage.storage import Storage


class OpenShard(ABC):
    """One shard file, open for random access."""

    hold: Hold | None = None
    """Keeps a cached file from being removed while it is open."""

    @abstractmethod
    def read(self, index: int, length: int) -> np.ndarray:
        """Tokens of document `index`, a 1-D view or array of the dataset's dtype with `length` elements."""


class TokenShards:
    """The documents of one split of a prepared dataset.

    Can be pickled and forked; each process opens shards when it first needs them and keeps the last
    `keep_open`. With `skip_damaged`, missing and damaged shards are no error until one is read.
    cache_bytes: size that the folder of downloaded and decompressed shards is kept to, 0 = half of its disk, -1 = any.
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
        manifest = storage.manifest
        if split not in manifest.splits:
            known = ", ".join(manifest.splits) or "none"
            raise ValueError(f"{storage.path} has no split {split!r}; it has: {known}")
        self.storage = storage
        self.split = split
        self.info: SplitInfo = manifest.splits[split]
        self.verify = verify
        self.keep_open = keep_open
        self.skip_damaged = skip_damaged
        self.cache_bytes = cache_bytes
        self.shard_documents = np.array([s.documents for s in self.info.shards], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.shard_documents)])
        self._lengths_path = storage.file(f"{split}/lengths.npy") if self.info.shards else None
        self._lengths: np.ndarray | None = None
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._verified: set[int] = set()
        self._damaged: dict[int, str] = {}
        for number, shard in enumerate(self.info.shards):
            with self._remembering_damage(number):
                storage.check_shard(split, shard)
        if self.info.shards and len(self._damaged) == len(self.info.shards):
            raise ValueError(f"no shard of {storage.path}/{split} can be used: {self._damaged[0]}")
        self._check_lengths()

    @property
    def manifest(self) -> Manifest:
        return self.storage.manifest

    @property
    def n_shards(self) -> int:
        return len(self.info.shards)

    def lengths(self, shard: int) -> np.ndarray:
        """uint32 (documents,): tokens of each document of a shard, without special tokens."""
        if self._lengths is None:
            assert self._lengths_path is not None
            where = f"{self.storage.path}: {self.split}/lengths.npy"
            self._lengths = read_vector(self._lengths_path, "uint32", where)
        return self._lengths[self._starts[shard] : self._starts[shard + 1]]

    def read(self, shard: int, index: int) -> np.ndarray:
        """Tokens of one document, 1-D uint16 or uint32 (not to be written to).

        Raises FileNotFoundError or DamagedShard if the shard is missing or damaged (with `skip_damaged` always the
        latter), other errors if it cannot be fetched.
        """
        length = int(self.lengths(shard)[index])
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            # Before the next is fetched: what is closed may make room for it in the cache.
            if len(self._open) >= self.keep_open:
                self._open.popitem(last=False)
            with self._remembering_damage(shard):
                if shard not in self._damaged:
                    self._open[shard] = self._open_shard(shard)
            if shard in self._damaged:
                raise DamagedShard(self._where(shard), self._damaged[shard].removeprefix(self._where(shard) + " "))
        return self._open[shard].read(index, length)

    def _open_shard(self, number: int) -> OpenShard:
        from matmix.data.formats import mds, webdataset

        shard, where = self.info.shards[number], self._where(number)
        verify = self.verify and number not in self._verified
        index = self.storage.file(f"{self.split}/index.json") if self.manifest.format == "mds" else None
        fetch = partial(self.storage.shard, self.split, shard, verify=verify)
        before = self.storage.published
        path, hold = hold_shard(self.storage.cache, fetch)
        if hold is not None and not (self._verified and before == self.storage.published):
            make_room(self.storage.cache.parent, self.cache_bytes)
        self._verified.add(number)
        if index is not None:
            opened = mds.open_shard(path, index, shard, dtype=self.manifest.dtype, where=where)
        else:
            opened = webdataset.open_shard(path, shard, dtype=self.manifest.dtype, where=where)
        opened.hold = hold
        return opened

    def _where(self, number: int) -> str:
        return f"{self.storage.path}: shard {self.split}/{self.info.shards[number].file}"

    @contextmanager
    def _remembering_damage(self, number: int) -> Iterator[None]:
        """With `skip_damaged`, a missing or damaged shard is written down and not an error yet."""
        try:
            yield
        except (DamagedShard, FileNotFoundError) as error:
            # Where the dataset as a whole has gone, as with a folder that is no longer mounted, nothing is skipped.
            if not self.skip_damaged or not self.storage.is_there():
                raise
            self._damaged[number] = str(error)

    def _check_lengths(self) -> None:
        for number, shard in enumerate(self.info.shards):
            lengths = self.lengths(number)
            if len(lengths) != shard.documents or int(lengths.sum(dtype=np.int64)) != shard.tokens:
                raise ValueError(
                    f"{self.storage.path}: {self.split}/lengths.npy does not agree with the manifest at "
                    f"shard {shard.file}; prepare the data again"
                )

    def __getstate__(self) -> dict:
        # A pickled memory map would carry its contents along: leave what a process can open again.
        return {**self.__dict__, "_lengths": None, "_open": OrderedDict(), "_verified": set()}
