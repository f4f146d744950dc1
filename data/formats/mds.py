"""Shards in MDS, the format of mosaicml-streaming: read by its own `MDSReader`, over a memory map.

A sample's bytes are decoded by the library; only where they come from is replaced, because `MDSReader`
opens the file anew for each sample. Pickled columns are refused before anything is read.
"""

import mmap
from pathlib import Path

import numpy as np

from matmix.data.artifacts import one_line, read_json
from matmix.data.formats.base import OpenShard
from matmix.data.manifest import ShardInfo
from matmix.data.storage.damaged_shard import damaged

COLUMN = "tokens"


def open_shard(path: Path, index: Path, shard: ShardInfo, *, dtype: str, where: str) -> OpenShard:
    """Opens the uncompressed shard at `path`, described by the dataset's `index.json`.

    Raises ValueError if index or shard are damaged, or the shard holds a pickled column.
    """
    from streaming.base.format.mds.reader import MDSReader

    try:
        entries = read_json(index)["shards"]
        entry = next(e for e in entries if e["raw_data"]["basename"] == path.name)
        reader = MDSReader.from_json(str(path.parent), None, entry)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError, StopIteration) as error:
        raise ValueError(str(damaged(where, f"index.json does not describe it ({one_line(repr(error))})"))) from None
    try:
        reader.validate(allow_unsafe_types=False)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {one_line(error)}") from None
    # A decoder is chosen by the encoding's name: no other than that of arrays is to run.
    plain = len(reader.column_encodings) == 1 and str(reader.column_encodings[0]).split(":")[0] == "ndarray"
    if reader.column_names != [COLUMN] or not plain or reader.samples != shard.documents:
        said = f"index.json lists {reader.samples!r} samples of {reader.column_names!r}"
        raise ValueError(str(damaged(where, one_line(said))))
    size = path.stat().st_size
    if size != reader.raw_data.bytes or size < 4 * (shard.documents + 2):
        raise damaged(where, f"it has {size} bytes instead of {reader.raw_data.bytes}")
    return _MdsShard(path, reader, shard.documents, dtype, where)


class _MdsShard(OpenShard):
    def __init__(self, path: Path, reader, documents: int, dtype: str, where: str) -> None:
        with path.open("rb") as file:
            self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._reader = reader
        self._dtype = np.dtype(dtype)
        self._where = where
        # Layout: uint32 count, uint32 offsets[count + 1], a JSON header, then the samples one after another.
        self._offsets = np.frombuffer(self._bytes, np.uint32, documents + 1, offset=4)
        ordered = bool(np.all(self._offsets[1:] >= self._offsets[:-1]))
        if not ordered or int(self._offsets[-1]) > len(self._bytes):
            raise damaged(where, "its table of samples is not in order")

    def read(self, index: int, length: int) -> np.ndarray:
        begin, end = self._offsets[index : index + 2].tolist()
        try:
            tokens = self._reader.decode_sample(self._bytes[begin:end])[COLUMN]
        except Exception as error:  # what random bytes make of the decoder
            raise damaged(self._where, f"document {index} does not decode ({error!r})") from None
        if tokens.dtype != self._dtype or tokens.shape != (length,):
            raise damaged(
                self._where,
                f"document {index} is {tokens.dtype} {tokens.shape} instead of {self._dtype} ({length},)",
            )
        return tokens
