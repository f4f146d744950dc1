"""MDS, the shard format of mosaicml-streaming.

A shard is: number of samples (uint32), offsets of the samples and of the end (uint32 each), the configuration as JSON,
the samples. A sample of one variable-size column is its size (uint32) and its bytes; an array of one axis is a byte
(axes << 2 | code of the length's type), the length, the values. A sample of pictures has the columns `image` (bytes, of
variable size) and `label` (int64).

Writing gives the same bytes as streaming's MDSWriter (a test compares them), which holds a whole directory and cannot
go on after a stop. Reading decodes the arrays by the library's own codec over a memory map, because its MDSReader opens
the file anew for each sample. Pickled columns are refused before anything is read.
"""

import importlib.util
import json
import mmap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from matmix.data.artifacts import one_line, read_json
from matmix.data.formats.base import LABEL_BYTES, PICTURES, OpenShard, ShardFormat, ShardInfo, damaged

COLUMN = "tokens"
_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError)


@cache
def mds_codec() -> ModuleType:
    """Returns the module of mosaicml-streaming that encodes and decodes the columns of MDS. It needs none other of the
    library and is loaded by its file: the library as a whole brings transformers, scikit-learn and scipy, 3 seconds
    and 300 MB for each reading process."""
    library = importlib.util.find_spec("streaming")
    assert library is not None
    (root,) = library.submodule_search_locations or ()
    path = Path(root, "base", "format", "mds", "encodings.py")
    spec = importlib.util.spec_from_file_location("_matmix_mds_encodings", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Mds(ShardFormat):
    """Shards with one column `tokens`, encoded `ndarray:<dtype>`; for pictures `image` and `label`."""

    suffix = ".mds"
    compressed_suffix = ".zstd"
    reads_index = True

    @property
    def shard_overhead(self) -> int:
        return 8 + len(self._config_json())

    def _config(self) -> dict[str, Any]:
        fixed = {"version": 2, "format": "mds", "hashes": ["sha256"]}
        return {**fixed, "compression": self.compression, "size_limit": self.size_limit, **_columns(self.dtype)}

    def _config_json(self) -> bytes:
        return json.dumps(self._config(), sort_keys=True).encode()

    def file_name(self, shard: int) -> str:
        return f"shard.{shard:05}.mds"

    def document_bytes(self, tokens: int) -> int:
        header = 0 if self.dtype == PICTURES else 1 + _length_type(tokens).itemsize
        return 4 + 4 + header + tokens * self.dtype.itemsize

    def encode(self, documents: list[np.ndarray], first: int) -> bytes:
        samples = [_sample(document) for document in documents]
        config = self._config_json()
        offsets = np.zeros(len(samples) + 1, dtype=np.int64)
        np.cumsum([len(s) for s in samples], out=offsets[1:])
        offsets += 4 + 4 * len(offsets) + len(config)
        head = np.uint32(len(samples)).tobytes() + offsets.astype("<u4").tobytes() + config
        return head + b"".join(samples)

    def index(self, shards: Sequence[ShardInfo]) -> dict[str, Any]:
        entries = []
        for shard in shards:
            raw = {"basename": self.raw_name(shard), "bytes": shard.raw_bytes, "hashes": {"sha256": shard.raw_sha256}}
            packed = {"basename": shard.file, "bytes": shard.bytes, "hashes": {"sha256": shard.sha256}}
            files = {"raw_data": raw, "zip_data": packed if self.compression else None}
            entries.append({**self._config(), "samples": shard.documents, **files})
        return {"version": 2, "shards": entries}

    @classmethod
    def read_index(cls, path: Path, where: str) -> dict[str, Any]:
        """Returns the entry of each shard by the name of its uncompressed file."""
        try:
            return {entry["raw_data"]["basename"]: entry for entry in read_json(path)["shards"]}
        except _ERRORS as error:
            raise _not_described(where, error) from None

    @classmethod
    def open_shard(cls, path: Path, shard: ShardInfo, *, dtype: str, where: str, index: dict[str, Any]) -> OpenShard:
        try:
            entry = index[path.name]
            names, encodings, sizes = (list(entry[f"column_{of}"]) for of in ("names", "encodings", "sizes"))
            kind, samples, stated = (entry["version"], entry["format"]), entry["samples"], entry["raw_data"]["bytes"]
        except _ERRORS as error:
            raise _not_described(where, error) from None
        if unsafe := [encoding for encoding in encodings if not mds_codec().is_mds_encoding_safe(str(encoding))]:
            raise ValueError(f"{where}: a column contains an unsafe type: {one_line(unsafe[0])}")
        # A decoder is chosen by the encoding's name: no other than that of arrays is to run.
        wanted = _columns(np.dtype(dtype))
        if wanted["column_names"] == [COLUMN]:
            plain = len(encodings) == len(sizes) == 1 and str(encodings[0]).split(":")[0] == "ndarray"
        else:
            plain = encodings == wanted["column_encodings"]
        if (kind, names, samples) != ((2, "mds"), wanted["column_names"], shard.documents) or not plain:
            said = (
                f"index.json lists {samples!r} samples of {names!r} encoded as {encodings!r}, version and format {kind}"
            )
            raise ValueError(str(damaged(where, one_line(said))))
        size = path.stat().st_size
        if size != stated or size < 4 * (shard.documents + 2):
            raise damaged(where, f"it has {size} bytes instead of {stated}")
        if np.dtype(dtype) == PICTURES:
            return _MdsPictures(path, shard.documents, dtype, where)
        return _MdsShard(path, shard.documents, dtype, where, str(encodings[0]), fixed=bool(sizes[0]))


def _not_described(where: str, error: Exception) -> ValueError:
    """Returns an error that is no `DamagedShard`: a damaged index must not make a shard be skipped."""
    return ValueError(str(damaged(where, f"index.json does not describe it ({one_line(repr(error))})")))


def _columns(dtype: np.dtype) -> dict[str, list[Any]]:
    if dtype == PICTURES:
        names, encodings, sizes = ["image", "label"], ["bytes", "int"], [None, LABEL_BYTES]
    else:
        names, encodings, sizes = [COLUMN], [f"ndarray:{dtype.name}"], [None]
    return {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}


def _length_type(tokens: int) -> np.dtype:
    return np.dtype("<u1" if tokens < 1 << 8 else "<u2" if tokens < 1 << 16 else "<u4")


def _sample(tokens: np.ndarray) -> bytes:
    if tokens.dtype == PICTURES:
        return np.uint32(len(tokens) - LABEL_BYTES).tobytes() + tokens.tobytes()
    kind = _length_type(len(tokens))
    axes = bytes([1 << 2 | {1: 0, 2: 1, 4: 2}[kind.itemsize]])
    data = axes + np.array(len(tokens), dtype=kind).tobytes() + tokens.tobytes()
    return np.uint32(len(data)).tobytes() + data


class _MdsShard(OpenShard):
    def __init__(
        self, path: Path, documents: int, dtype: str, where: str, encoding: str = "", fixed: bool = False
    ) -> None:
        """encoding: of the column of tokens; fixed: its samples are of one size, which stands in the index only."""
        with path.open("rb") as file:
            self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._dtype, self._where = np.dtype(dtype), where
        self._encoding, self._head = encoding, 0 if fixed else 4
        # Layout: uint32 count, uint32 offsets[count + 1], a JSON header, then the samples one after another.
        self._offsets = np.frombuffer(self._bytes, np.uint32, documents + 1, offset=4)
        ordered = bool(np.all(self._offsets[1:] >= self._offsets[:-1]))
        if not ordered or int(self._offsets[-1]) > len(self._bytes):
            raise damaged(where, "its table of samples is not in order")

    def read(self, index: int, length: int) -> np.ndarray:
        begin, end = self._offsets[index : index + 2].tolist()
        try:
            tokens = mds_codec().mds_decode(self._encoding, self._bytes[begin + self._head : end])
        except Exception as error:  # what random bytes make of the decoder
            raise damaged(self._where, f"document {index} does not decode ({error!r})") from None
        if (tokens.dtype, tokens.shape) != (self._dtype, (length,)):
            wanted = f"{self._dtype} ({length},)"
            raise damaged(self._where, f"document {index} is {tokens.dtype} {tokens.shape} instead of {wanted}")
        return tokens


class _MdsPictures(_MdsShard):
    def read(self, index: int, length: int) -> np.ndarray:
        begin, end = self._offsets[index : index + 2].tolist()
        size = int.from_bytes(self._bytes[begin : begin + 4], "little") if end - begin >= 4 + LABEL_BYTES else -1
        if (size + LABEL_BYTES, end - begin) != (length, 4 + length):
            raise damaged(self._where, f"document {index} has not the {length} bytes of its picture and label")
        return np.frombuffer(self._bytes, PICTURES, length, offset=begin + 4)
