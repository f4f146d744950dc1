"""Megatron-LM's tokens: NAME.bin holds the ids of all sequences, NAME.idx says where they lie.

The index, little-endian (megatron/core/datasets/indexed_dataset.py): MMIDIDX and two zero bytes, the version 1
(uint64), the code of the dtype (uint8), the number S of sequences and D of entries of the last table (uint64 each); the
length of each sequence in tokens (int32), its first byte in the .bin (int64), and the number of the first sequence of
each document, ending with S (int64, D entries: one more than documents). Files of several modalities have S bytes more.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from matmix.data.indexing.base import Layout, Places, ids_dtype, mapped

_MAGIC = b"MMIDIDX\0\0"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}


class Megatron(Layout):
    suffixes = (".bin",)

    def files(self, path: Path) -> Sequence[Path]:
        index = path.with_suffix(".idx")
        if not index.is_file():
            raise FileNotFoundError(f"{path} has no {index.name} beside it; files without an index are --format flat")
        return [path, index]

    def places(self, path: Path) -> Places:
        index = path.with_suffix(".idx")
        raw, size = mapped(index), path.stat().st_size
        if len(raw) < _HEAD.size or bytes(raw[: len(_MAGIC)]) != _MAGIC:
            raise ValueError(f"{index} is no index of Megatron-LM: it does not begin with MMIDIDX")
        _, version, code, sequences, entries = _HEAD.unpack_from(raw)
        if version != 1:
            raise ValueError(f"{index} has version {version}; version 1 is read")
        dtype = ids_dtype(_DTYPES.get(code, f"dtype {code}"), path)
        wanted = _HEAD.size + 12 * sequences + 8 * entries
        if len(raw) == wanted + sequences and sequences:
            raise ValueError(f"{index} is of several modalities; files of text alone are read")
        if len(raw) != wanted:
            raise ValueError(
                f"{index} has {len(raw):,} bytes instead of {wanted:,}, those of {sequences:,} sequences: it is damaged"
            )
        lengths = np.frombuffer(raw, "<i4", sequences, _HEAD.size).astype(np.int64)
        starts = np.frombuffer(raw, "<i8", sequences, _HEAD.size + 4 * sequences)
        documents = np.frombuffer(raw, "<i8", entries, _HEAD.size + 12 * sequences)
        ends = np.cumsum(np.maximum(lengths, 0)) * dtype.itemsize
        if lengths.min(initial=0) < 0 or not np.array_equal(starts, ends - lengths * dtype.itemsize):
            raise ValueError(f"{index} is damaged: its sequences do not lie one after another")
        if (total := int(ends[-1]) if sequences else 0) != size:
            raise ValueError(f"{index} disagrees with {path.name}: it describes {total:,} bytes, there are {size:,}")
        in_order = entries and documents[0] == 0 and documents[-1] == sequences and (np.diff(documents) >= 0).all()
        if not in_order:
            raise ValueError(f"{index} is damaged: its documents do not cover its {sequences:,} sequences in order")
        borders = np.concatenate([np.zeros(1, np.int64), ends])[documents]
        return Places(dtype=dtype, starts=borders[:-1], lengths=np.diff(borders) // dtype.itemsize)
