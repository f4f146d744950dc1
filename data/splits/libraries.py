"""Opens shards by the libraries of their formats (`data.reader`): the same documents, checked in the same way.

**streaming**: mosaicml-streaming's clients fetch an MDS shard into the cache, and its MDSReader reads the samples.
**webdataset**: the stages of a WebDataset pipeline go through a tar file from front to back, straight from its store.
Nothing is written to a disk: the documents of an open shard are in memory.

A StreamingDataset, which deals samples out by memory that all ranks of a machine share, is left out: who reads which
shards, and from where a run goes on, is said by `matmix.data.loading.order.Streams`. (Directories that were not
prepared are read by one: `matmix.data.foreign`.)

The libraries' own decoders of members and columns do not run, but for MDS that of arrays, bytes and whole numbers:
nothing in a file chooses a decoder, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.artifacts import artifact_path
from matmix.data.formats.base import PICTURES, DamagedShard, OpenShard, ShardInfo, damaged, pack
from matmix.data.formats.mds import COLUMN
from matmix.data.storage.remote import RemoteFolder
from matmix.data.storage.storage import Storage

FORMAT_OF = {"streaming": "mds", "webdataset": "webdataset"}
"""Values of `data.reader` that are libraries -> the format of shards that each reads."""


class OpenByStreaming(OpenShard):
    """An MDS shard that mosaicml-streaming reads; it opens the file anew for each sample. entry: of index.json, checked
    before (`Mds.open_shard`)."""

    def __init__(self, path: Path, entry: dict[str, Any], dtype: str, where: str) -> None:
        from streaming.base.format import reader_from_json

        self._reader = reader_from_json(str(path.parent), "", entry)
        self._dtype, self._where = np.dtype(dtype), where

    def read(self, index: int, length: int) -> np.ndarray:
        try:
            sample = self._reader[index]
            document = pack(sample["image"], sample["label"]) if self._dtype == PICTURES else sample[COLUMN]
        except Exception as error:  # what random bytes make of the decoder
            raise damaged(self._where, f"document {index} does not decode ({error!r})") from None
        return _checked(document, index, length, self._dtype, self._where)


class OpenByWebDataset(OpenShard):
    """A tar file whose documents are in memory. data: its bytes, not compressed."""

    def __init__(self, data: bytes, documents: int, dtype: str, where: str) -> None:
        from webdataset.tariterators import group_by_keys, tar_file_expander

        self._dtype, self._where = np.dtype(dtype), where
        try:
            samples = group_by_keys(tar_file_expander([{"url": "shard", "stream": io.BytesIO(data)}]))
            self._documents = [self._decode(sample) for sample in samples]
        except Exception as error:  # what random bytes make of tarfile and the library
            raise damaged(where, f"webdataset cannot read it ({type(error).__name__})") from None
        if len(self._documents) != documents:
            raise damaged(where, f"it holds {len(self._documents)} documents instead of {documents}")

    def _decode(self, sample: dict[str, Any]) -> np.ndarray:
        """Returns the document of a sample: the bytes of its members by suffix. Raises any error."""
        if self._dtype != PICTURES:
            return np.lib.format.read_array(io.BytesIO(sample["npy"]), allow_pickle=False)
        (picture,) = (content for suffix, content in sample.items() if suffix != "cls" and suffix[:2] != "__")
        digits = sample["cls"]
        assert digits.isdigit()
        assert len(digits) <= 18
        return pack(picture, int(digits))

    def read(self, index: int, length: int) -> np.ndarray:
        return _checked(self._documents[index], index, length, self._dtype, self._where)


def open_by_webdataset(storage: Storage, split: str, shard: ShardInfo, *, verify: bool, where: str) -> OpenShard:
    """Opens a shard of tar files. Raises as `Storage.shard`, and DamagedShard if it does not hold the documents."""
    stored, dtype = f"{split}/{shard.file}", storage.manifest.dtype
    if storage.remote:
        data = RemoteFolder(storage.path).read(stored, shard.bytes + 1)
    else:
        path = artifact_path(storage.path, stored, storage.path, nested=True)
        data = path.read_bytes() if path.is_file() else None
    if data is None:
        raise FileNotFoundError(f"{where} is missing; prepare the data again")
    if len(data) != shard.bytes or (verify and hashlib.sha256(data).hexdigest() != shard.sha256):
        raise damaged(where, "it has other bytes than the manifest says")
    if storage.manifest.compression is not None:
        data = _decompressed(data, min(shard.raw_bytes, shard.largest_raw_size(dtype)), where)
    return OpenByWebDataset(data, shard.documents, dtype, where)


def _decompressed(data: bytes, size: int, where: str) -> bytes:
    """Returns the `size` bytes that zstd data decompresses to, and no more than that whatever it says of itself."""
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as stream:
            raw = stream.read(size + 1)
    except zstandard.ZstdError as error:
        raise DamagedShard(where, f"does not decompress ({error})") from None
    if len(raw) != size:
        raise damaged(where, f"it does not decompress to {size} bytes")
    return raw


def _checked(document: np.ndarray, index: int, length: int, dtype: np.dtype, where: str) -> np.ndarray:
    if (document.dtype, document.shape) != (dtype, (length,)):
        wanted = f"{dtype} ({length},)"
        raise damaged(where, f"document {index} is {document.dtype} {document.shape} instead of {wanted}")
    return document
