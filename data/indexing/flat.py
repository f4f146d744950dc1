"""Flat files of ids, in which a token ends (or begins) each document: nanoGPT's .bin, OLMo's .npy, llm.c's .bin.

The .npy files of OLMo are ids alone, as are nanoGPT's .bin files; those that begin with numpy's header are read by it.
Those of llm.c and modded-nanogpt begin with 256 numbers (int32): a mark and its version, which tell the dtype, and the
number of ids (llm.c, dev/data/data_common.py).
"""

import struct
from pathlib import Path

import numpy as np

from matmix.data.indexing.base import Layout, Places, ids_dtype, mapped

_NUMPY = b"\x93NUMPY"
_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Mark -> its version, and the dtype of the ids."""
_LLM_C_HEADER = struct.Struct("<3i")
_LLM_C_BYTES = 1024
_PIECE = 1 << 24  # ids looked at at once


class Flat(Layout):
    suffixes = (".bin", ".npy")

    def places(self, path: Path) -> Places:
        data, first = mapped(path), 0
        name = self.dtype or ("uint16" if self.vocab_size <= 1 << 16 else "uint32")
        if bytes(data[: len(_NUMPY)]) == _NUMPY:
            name, first = _numpy_header(path)
        elif len(data) >= 4 and struct.unpack_from("<i", data)[0] in _LLM_C:
            name, first = _llm_c_header(path, data)
        dtype = ids_dtype(name, path)
        if (len(data) - first) % dtype.itemsize:
            raise ValueError(f"{path} has {len(data):,} bytes, no whole number of {name}; give its --dtype")
        ids = np.frombuffer(data, dtype, (len(data) - first) // dtype.itemsize, first)
        if self.end is None:
            return Places(dtype=dtype, starts=np.array([first]), lengths=np.array([len(ids)]))
        pieces = range(0, len(ids), _PIECE)
        ends = np.concatenate(
            [np.zeros(0, np.int64), *(np.flatnonzero(ids[at : at + _PIECE] == self.end) + at for at in pieces)]
        )
        if not len(ends):
            raise ValueError(
                f"{path} does not hold the end token {self.end}, so that its documents have no borders; name the right "
                "one with --end, or give --end none to take each file as one document"
            )
        starts = np.concatenate([[0], ends + 1])
        lengths = np.append(ends, len(ids)) - starts
        if not lengths[-1]:  # the file ends with an end token
            starts, lengths = starts[:-1], lengths[:-1]
        return Places(dtype=dtype, starts=first + starts * dtype.itemsize, lengths=lengths)


def _llm_c_header(path: Path, data: memoryview) -> tuple[str, int]:
    """Returns the dtype of the ids behind the header of llm.c, and where they begin. Raises ValueError (one line)."""
    mark, *says = _LLM_C_HEADER.unpack_from(bytes(data[: _LLM_C_HEADER.size]).ljust(_LLM_C_HEADER.size, b"\0"))
    version, name = _LLM_C[mark]
    size = _LLM_C_BYTES + says[1] * np.dtype(name).itemsize
    if says[0] != version or size != len(data):
        raise ValueError(
            f"{path} begins with the mark of llm.c's files, and is damaged or of another version: version {says[0]} "
            f"and {says[1]:,} ids instead of {version} and those that make {len(data):,} bytes with the header"
        )
    return name, _LLM_C_BYTES


def _numpy_header(path: Path) -> tuple[str, int]:
    """Returns the dtype of an array's file, and where its elements begin. Raises ValueError (one line)."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # the header is Python's syntax: what it makes of a damaged one has many kinds
        reason = str(error).partition("\n")[0][:200]
        raise ValueError(f"{path} is damaged ({reason})") from None
    if array.ndim != 1 or array.dtype.byteorder == ">":
        raise ValueError(f"{path} is no list of little-endian ids, but {array.dtype} of the shape {array.shape}")
    return array.dtype.name, array.offset
