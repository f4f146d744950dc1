"""MDS, the shard format of mosaicml-streaming.

A shard is: number of samples (uint32), offsets of the samples and of the end (uint32 each), the configuration
as JSON, the samples. A sample of one variable-size column is its size (uint32) and its bytes; an array of one
axis is a byte (axes << 2 | code of the length's type), the length, the values. The files are the same bytes
that streaming's MDSWriter writes (a test compares them); they are laid out here because that writer holds a
whole directory and cannot go on after a stop, and because importing it costs every tokenising process four
seconds.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from matmix.data.formats.writing import Shard, ShardFormat

COLUMN = "tokens"


class MdsFormat(ShardFormat):
    """One column `tokens`, encoded `ndarray:<dtype>`."""

    name = "mds"
    compressed_suffix = ".zstd"

    @property
    def shard_overhead(self) -> int:
        return 8 + len(self._config_json())

    def _config(self) -> dict[str, Any]:
        return {
            "version": 2,
            "format": "mds",
            "compression": self.compression,
            "hashes": ["sha256"],
            "size_limit": self.size_limit,
            "column_names": [COLUMN],
            "column_encodings": [f"ndarray:{self.dtype.name}"],
            "column_sizes": [None],
        }

    def _config_json(self) -> bytes:
        return json.dumps(self._config(), sort_keys=True).encode()

    def file_name(self, shard: int) -> str:
        return f"shard.{shard:05}.mds"

    def document_bytes(self, tokens: int) -> int:
        return 4 + 4 + 1 + _length_type(tokens).itemsize + tokens * self.dtype.itemsize

    def encode(self, documents: list[np.ndarray], first: int) -> bytes:
        samples = [_sample(d) for d in documents]
        config = self._config_json()
        offsets = np.zeros(len(samples) + 1, dtype=np.int64)
        np.cumsum([len(s) for s in samples], out=offsets[1:])
        offsets += 4 + 4 * len(offsets) + len(config)
        head = np.uint32(len(samples)).tobytes() + offsets.astype("<u4").tobytes() + config
        return head + b"".join(samples)

    def index(self, shards: list[Shard]) -> dict[str, Any]:
        return {"version": 2, "shards": [{**self._config(), **_files(s)} for s in shards]}


def _files(shard: Shard) -> dict[str, Any]:
    raw = {"basename": shard.raw_file, "bytes": shard.raw_bytes, "hashes": {"sha256": shard.raw_sha256}}
    packed = {"basename": shard.file, "bytes": shard.bytes, "hashes": {"sha256": shard.sha256}}
    is_packed = shard.file != shard.raw_file
    return {"samples": shard.documents, "raw_data": raw, "zip_data": packed if is_packed else None}


def _length_type(tokens: int) -> np.dtype:
    return np.dtype("<u1" if tokens < 1 << 8 else "<u2" if tokens < 1 << 16 else "<u4")


def _sample(tokens: np.ndarray) -> bytes:
    kind = _length_type(len(tokens))
    axes = bytes([1 << 2 | {1: 0, 2: 1, 4: 2}[kind.itemsize]])
    data = axes + np.array(len(tokens), dtype=kind).tobytes() + tokens.tobytes()
    return np.uint32(len(data)).tobytes() + data
