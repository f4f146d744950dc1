"""MDS, the shard format of mosaicml-streaming.

A shard is: number of samples (uint32), offsets of the samples and of the end (uint32 each), the configuration as JSON,
the samples. A sample of one variable-size column is its size (uint32) and its bytes; an array of one axis is a byte
(axes << 2 | code of the length's type), the length, the values. A sample of pictures has the columns `image` (bytes, of
variable size) and `label` (int64).

Writing gives the same bytes as streaming's MDSWriter (a test compares them), which holds a whole directory and cannot
go on after a stop. Reading uses the library's own `MDSReader` over a memory map, because that opens the file anew for
each sample. Pickled columns are refused before anything is read.
"""

import importlib
import importlib.util
import json
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from matmix.data.artifacts import one_line, read_json
from matmix.data.formats.base import LABEL_BYTES, PICTURES, OpenShard, ShardFormat, ShardInfo, damaged

COLUMN = "tokens"
_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError)


class _Package(ModuleType):
    """A package whose own code runs when somebody asks for a name that is not there yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def streaming_module(name: str) -> ModuleType:
    """Returns the module `streaming.base.<name>` of mosaicml-streaming, without what its packages import first
    (transformers, scikit-learn and scipy: more than half of what each reading process would import). For everybody else
    the library is whole, loaded when it is used. Raises ImportError where it is not installed."""
    for package in ("streaming", "streaming.base"):
        if package not in sys.modules and (spec := importlib.util.find_spec(package)):
            module = importlib.util.module_from_spec(spec)
            module.__class__ = _Package
            sys.modules[package] = module
            parent, _, child = package.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
    return importlib.import_module(f"streaming.base.{name}")


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
        library = streaming_module("format.mds.reader")
        try:
            reader = library.MDSReader.from_json(str(path.parent), None, dict(index[path.name]))
        except _ERRORS as error:
            raise _not_described(where, error) from None
        try:
            reader.validate(allow_unsafe_types=False)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {one_line(error)}") from None
        # A decoder is chosen by the encoding's name: no other than that of arrays is to run.
        wanted, encodings = _columns(np.dtype(dtype)), [str(name) for name in reader.column_encodings]
        if wanted["column_names"] == [COLUMN]:
            plain = len(encodings) == 1 and encodings[0].split(":")[0] == "ndarray"
        else:
            plain = encodings == wanted["column_encodings"]
        if reader.column_names != wanted["column_names"] or not plain or reader.samples != shard.documents:
            said = f"index.json lists {reader.samples!r} samples of {reader.column_names!r}"
            raise ValueError(str(damaged(where, one_line(said))))
        size = path.stat().st_size
        if size != reader.raw_data.bytes or size < 4 * (shard.documents + 2):
            raise damaged(where, f"it has {size} bytes instead of {reader.raw_data.bytes}")
        kind = _MdsPictures if np.dtype(dtype) == PICTURES else _MdsShard
        return kind(path, reader, shard.documents, dtype, where)


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
    def __init__(self, path: Path, reader, documents: int, dtype: str, where: str) -> None:
        with path.open("rb") as file:
            self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._reader, self._dtype, self._where = reader, np.dtype(dtype), where
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
