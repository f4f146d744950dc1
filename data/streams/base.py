"""The interface of prepared shards: token arrays of documents, by shard and index, in any order.

`TokenShards` is all that the layers above know of the storage; the formats differ only in how a shard
file is opened (`matmix.data.streams.mds`, `matmix.data.streams.webdataset`). Reading is random access
into memory-mapped files: the pages are shared by all processes of a machine, and a document costs no
more than a view.

Documents are numbered inside their shard in the order in which they were written; `lengths.npy` holds
their token counts in that order over all shards of the split, which makes every sequence addressable
without reading a shard.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path

import numpy as np

from matmix.data.manifest import Manifest, SplitInfo
from matmix.data.streams.storage import Storage


class OpenShard(ABC):
    """One shard file, open for random access."""

    @abstractmethod
    def read(self, index: int, length: int) -> np.ndarray:
        """Tokens of document `index`, a 1-D view or array of the dataset's dtype with `length` elements."""


class TokenShards:
    """The documents of one split of a prepared dataset.

    Can be pickled and forked; each process opens shards when it first needs them and keeps the last
    `keep_open`.
    """

    def __init__(self, storage: Storage, split: str, *, verify: bool = True, keep_open: int = 64) -> None:
        manifest = storage.manifest
        if split not in manifest.splits:
            known = ", ".join(manifest.splits) or "none"
            raise ValueError(f"{storage.path} has no split {split!r}; it has: {known}")
        self.storage = storage
        self.split = split
        self.info: SplitInfo = manifest.splits[split]
        self.verify = verify
        self.keep_open = keep_open
        self.shard_documents = np.array([s.documents for s in self.info.shards], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.shard_documents)])
        self._lengths_path = storage.file(f"{split}/lengths.npy") if self.info.shards else None
        self._lengths: np.ndarray | None = None
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._verified: set[int] = set()
        for shard in self.info.shards:
            storage.check_shard(split, shard)
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
            self._lengths = _load_lengths(self._lengths_path, self.storage.path)
        return self._lengths[self._starts[shard] : self._starts[shard + 1]]

    def read(self, shard: int, index: int) -> np.ndarray:
        """Tokens of one document, 1-D uint16 or uint32 (not to be written to).

        Raises FileNotFoundError or ValueError if the shard is missing, damaged or cannot be fetched.
        """
        length = int(self.lengths(shard)[index])
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            self._open[shard] = self._open_shard(shard)
            if len(self._open) > self.keep_open:
                self._open.popitem(last=False)
        return self._open[shard].read(index, length)

    def _open_shard(self, number: int) -> OpenShard:
        from matmix.data.streams import mds, webdataset

        shard = self.info.shards[number]
        path = self.storage.shard(self.split, shard, verify=self.verify and number not in self._verified)
        self._verified.add(number)
        where = f"{self.storage.path}: shard {self.split}/{shard.file}"
        if self.manifest.format == "mds":
            index = self.storage.file(f"{self.split}/index.json")
            return mds.open_shard(path, index, shard, dtype=self.manifest.dtype, where=where)
        return webdataset.open_shard(path, shard, dtype=self.manifest.dtype, where=where)

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


def _load_lengths(path: Path | None, where: str) -> np.ndarray:
    assert path is not None
    try:
        lengths = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{where}: {path.parent.name}/lengths.npy is damaged ({error})") from None
    if lengths.dtype != np.uint32 or lengths.ndim != 1:
        raise ValueError(f"{where}: {path.parent.name}/lengths.npy is not a list of uint32")
    return np.asarray(lengths)  # a plain view: memmap objects are slow to index


def damaged(where: str, why: str) -> ValueError:
    """The error for a shard whose contents are not what the index promises."""
    return ValueError(f"{where} is damaged: {why}; fetch or prepare the data again")
