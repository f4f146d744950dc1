"""Chunks that litdata's `optimize` wrote with its `TokensLoader`: each item is a document.

A chunk, little-endian (litdata/streaming/writer.py): the number N of items (uint32), where each begins and the last one
ends (uint32, N + 1 entries), then the ids of the items. index.json lists the chunks of its folder and names the dtype
by a number, `no_header_tensor:16`: the place in a list of litdata's, which has torch's dtypes or numpy's.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from matmix.data.artifacts import artifact_name, fits, one_line, read_json
from matmix.data.indexing.base import Layout, Places, ids_dtype, mapped

_INDEX = "index.json"
_DTYPES = {
    "no_header_tensor": {"15": "int32", "16": "int32", "17": "int64", "18": "int64", "20": "uint16"},
    "no_header_numpy": {"2": "int32", "3": "int64", "5": "uint16", "6": "uint32"},
}
_PLAIN = ("compression", "compression_level", "ipc_compression", "encryption")
_CHUNK = {"filename": str, "chunk_size": int}


class LitData(Layout):
    suffixes = (".bin",)

    def files(self, path: Path) -> Sequence[Path]:
        index = path.with_name(_INDEX)
        if not index.is_file():
            raise FileNotFoundError(f"{path} has no {_INDEX} beside it, which says what is in the chunks of litdata")
        return [path, index]

    def places(self, path: Path) -> Places:
        index = path.with_name(_INDEX)
        stat = index.stat()
        dtype, chunks = _read_index(index, stat.st_mtime_ns, stat.st_size)
        if path.name not in chunks:
            raise ValueError(f"{path} is no chunk that the {_INDEX} beside it lists: move it elsewhere")
        (count, tokens), data = chunks[path.name], mapped(path)
        kind, head = ids_dtype(dtype, path), 4 * (count + 2)
        if len(data) < head or int.from_bytes(data[:4], "little") != count:
            raise ValueError(f"{path} is damaged: it does not begin with the {count:,} items of its {_INDEX}")
        offsets = np.frombuffer(data, "<u4", count + 1, 4).astype(np.int64)
        sizes = np.diff(offsets)
        if offsets[0] != head or offsets[-1] != len(data) or (sizes < 0).any() or (sizes % kind.itemsize).any():
            raise ValueError(f"{path} is damaged: its items do not lie one after another up to its end")
        if int(sizes.sum()) != tokens * kind.itemsize:
            raise ValueError(f"{path} does not hold the {tokens:,} ids of {dtype} of its {_INDEX}: it is damaged")
        return Places(dtype=kind, starts=offsets[:-1], lengths=sizes // kind.itemsize)


@functools.lru_cache(maxsize=8)
def _read_index(path: Path, changed: int, size: int) -> tuple[str, dict[str, tuple[int, int]]]:
    """Returns the dtype of the ids, and the name of each chunk with its numbers of items and ids. changed, size: tell
    versions of the file apart. Raises FileNotFoundError and ValueError (one line)."""
    index = read_json(path)
    if not fits(index, {"chunks": [_CHUNK], "config": {"data_format": [str]}}):
        raise ValueError(f"{path} is damaged, or none of litdata: it does not describe its chunks")
    config, chunks = index["config"], index["chunks"]
    if packed := [name for name in _PLAIN if config.get(name)]:
        raise ValueError(
            f"{path}: its chunks have the {packed[0]} {one_line(config[packed[0]])!r:.60}: write them without"
        )
    kind, _, number = config["data_format"][0].partition(":") if len(config["data_format"]) == 1 else ("", "", "")
    tokens = all(fits(chunk.get("dim"), int) for chunk in chunks)
    if kind not in _DTYPES or not tokens or config.get("item_loader", "TokensLoader") != "TokensLoader":
        found = one_line(", ".join(config["data_format"]))
        raise ValueError(f"{path}: its items are no lists of ids as of litdata's TokensLoader, but {found:.200}")
    if (dtype := _DTYPES[kind].get(number)) is None:
        raise ValueError(
            f"{path}: its ids are {one_line(config['data_format'][0]):.60} of litdata, no dtype of token ids"
        )
    listed = {artifact_name(chunk["filename"], path): (chunk["chunk_size"], chunk["dim"]) for chunk in chunks}
    for name in listed:
        if not path.with_name(name).is_file():
            raise FileNotFoundError(f"{path} lists {one_line(name)}, which is not there")
    return dtype, listed
