"""Arrays of one axis in .npy files, written in pieces, and mapped where they hold the expected kind of array."""

import io
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from matmix.data.storage.files import write_atomic


def write_vector(path: Path, dtype: str, length: int, pieces: Iterable[bytes]) -> None:
    """Writes an array of one axis from the bytes of its elements, whole or not at all."""
    header = io.BytesIO()
    described = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(header, described)
    write_atomic(path, itertools.chain([header.getvalue()], pieces))


def read_vector(path: Path, dtype: str, where: object, *, length: int | None = None) -> np.ndarray:
    """Returns the array of one axis in a .npy file, mapped read-only, whatever memory its header asks for. Raises
    FileNotFoundError where there is none, ValueError (one line that begins with `where`) where it is damaged, of
    another kind, or has not `length` elements."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise
    except Exception as error:  # the header is Python's syntax: what it makes of a damaged one has many kinds
        reason = str(error).partition("\n")[0][:200]
        raise ValueError(f"{where} is damaged ({reason})") from None
    if array.dtype != np.dtype(dtype) or array.ndim != 1:
        raise ValueError(f"{where} is not a list of {np.dtype(dtype).name}")
    if length is not None and len(array) != length:
        raise ValueError(f"{where} has {len(array):,} elements instead of {length:,}")
    return np.asarray(array)  # a plain view: memmap objects are slow to index
