"""MDS shards of others with a column `tokens`, such as llm-foundry's: each sample is a document.

A shard is described in `matmix.data.formats.mds`. In a sample the sizes of the columns of variable size (uint32) come
first, then the columns. `bytes` are the ids alone, of --dtype (int64 where it is not given, as llm-foundry writes);
`ndarray:<dtype>` has its shape before them, `ndarray:<dtype>:<length>` has not.
"""

from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.artifacts import fits, one_line, parse_json
from matmix.data.formats.mds import COLUMN
from matmix.data.indexing.base import Layout, Places, ids_dtype, mapped

_MOST_COLUMNS = 1000


class TokenMds(Layout):
    suffixes = (".mds",)

    def places(self, path: Path) -> Places:
        data = np.frombuffer(mapped(path), np.uint8)
        count = int(_numbers(data, np.zeros(1, np.int64), path)[0])
        if 4 * (count + 2) > len(data):
            raise _damaged(path, f"it cannot hold {count:,} samples")
        offsets = data[4 : 4 * (count + 2)].view("<u4").astype(np.int64)
        head = 4 * (count + 2)
        if offsets[0] < head or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
            raise _damaged(path, "its table of samples is not in order")
        names, encodings, fixed = _columns(parse_json(data[head : offsets[0]].tobytes(), path), len(data), path)
        if COLUMN not in names:
            raise ValueError(f"{path} has no column {COLUMN}, but {one_line(', '.join(names))}")
        number = names.index(COLUMN)
        sizes_at, at = offsets[:-1], offsets[:-1] + 4 * fixed.count(None)
        for one in fixed[: number + 1]:
            size = np.full(count, one, np.int64) if one is not None else _numbers(data, sizes_at, path)
            sizes_at, at = sizes_at + 4 * (one is None), at + size
        at = at - size
        if (at + size > offsets[1:]).any():
            raise _damaged(path, "a sample is larger than its place")
        encoding = encodings[number]
        kind, _, rest = encoding.partition(":")
        if kind not in ("bytes", "ndarray") or (kind == "ndarray") != bool(rest):
            raise ValueError(f"{path}: the column {COLUMN} is {one_line(encoding)}; bytes and ndarray:<dtype> are read")
        dtype = ids_dtype(rest.partition(":")[0] or self.dtype or "int64", path)
        if kind == "ndarray" and ":" not in rest:
            shape = data[np.minimum(at, len(data) - 1)] if count else np.zeros(0, np.uint8)
            width = 1 << (shape & 3).astype(np.int64)
            if (shape >> 2 != 1).any() or (width > 4).any():
                raise _damaged(path, "its arrays have more than one axis")
            at, size = at + 1 + width, size - 1 - width
        if (size < 0).any() or (size % dtype.itemsize).any():
            raise _damaged(path, f"its samples are no lists of {dtype.name}; name another --dtype")
        return Places(dtype=dtype, starts=at, lengths=size // dtype.itemsize)


def _columns(config: Any, largest: int, path: Path) -> tuple[list[str], list[str], list[int | None]]:
    """Returns the names, encodings and sizes (None: they vary) of the columns. largest: bytes of a column at most."""
    keys = ("column_names", "column_encodings", "column_sizes")
    if fits(config, dict(zip(keys, ([str], [str], [object]), strict=True))):
        names, encodings, sizes = (config[key] for key in keys)
        known = all(size is None or (fits(size, int) and size <= largest) for size in sizes)
        if known and len(names) == len(encodings) == len(sizes) <= _MOST_COLUMNS:
            return names, encodings, sizes
    raise _damaged(path, "it does not describe its columns")


def _numbers(data: np.ndarray, at: np.ndarray, path: Path) -> np.ndarray:
    """Returns the uint32 at each place, as int64 (n,)."""
    if len(at) and int(at.max()) + 4 > len(data):
        raise _damaged(path, "it ends inside a sample")
    return (data[at[:, None] + np.arange(4)].astype(np.int64) << np.arange(0, 32, 8)).sum(axis=1)


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged, or no MDS shard: {why}")
