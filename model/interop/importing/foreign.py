"""Reads the files of checkpoints that others made: JSON, names of weight files, tensors. Every error is one line, and
nothing in a file is executed. (`matmix.data.artifacts` does the same for data and runs.)"""

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError where it holds none."""
    try:
        values = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return values


def indexed_files(index: Path) -> list[Path]:
    """Returns the files of weights that an index names, beside it. Raises ValueError for an index without them, and for
    names that lead elsewhere, also by a link."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{index} names no files of weights")
    for name in files.values():
        plain = isinstance(name, str) and name.isprintable() and not set(name) & set("/\\")
        if not plain or name in ("", ".", ".."):
            raise ValueError(f"{index} names the file {ascii(name)[:100]}, which is no plain name beside it")
        if (index.parent / name).is_symlink():
            raise ValueError(f"{index} names {name!a}, but that is a link: put the file itself there")
    return [index.parent / name for name in sorted(set(files.values()))]


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a .safetensors file. Raises ValueError, FileNotFoundError."""
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path}") from None
    except Exception as error:  # unknown types of numbers end in kinds of their own
        raise ValueError(f"{path} is not a readable safetensors file: {_reason(error)}") from None


class _Skipped:
    """What a trainer saves beside the weights (random states of numpy, durations): neither built nor kept."""

    def __init__(self, *parts: Any) -> None: ...

    def __setstate__(self, parts: Any) -> None: ...


_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_SKIPPED = [(_Skipped, name) for name in (*_RECONSTRUCT, "numpy.ndarray", "numpy.dtype", "datetime.timedelta")]


def read_torch(path: Path) -> Any:
    """Returns the content of a torch file, read without unpickling code. Arrays of numpy and durations, which whole
    checkpoints of trainers hold too, are skipped. Raises ValueError, FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    try:
        mapped = zipfile.is_zipfile(path)  # files of old versions of torch are none, and have no map
        if mapped:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
            # torch compresses no entries, and their content may be far larger than the file.
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not stored or sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise ValueError("its entries are compressed or larger than the file")
        # All processes of a machine share the map.
        with torch.serialization.safe_globals(_SKIPPED):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # what damaged bytes make of the reader has many kinds
        raise ValueError(
            f"{path} cannot be read as plain tensors ({_reason(error)}); save its state dict alone, best as "
            ".safetensors"
        ) from None


def check_plain(name: str, tensor: torch.Tensor, path: Path) -> None:
    """Raises ValueError unless a tensor is a dense one in memory that has a number of its own for each element."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    plain = plain and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise ValueError(f"{path} holds {ascii(name)[:100]}, which is no plain tensor with all its numbers")


def _reason(error: Exception) -> str:
    if "weights_only" in str(error):  # torch's advice is to run the code in the file
        return "it is no file of torch, or it holds more than tensors"
    text = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
