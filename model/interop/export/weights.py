"""Writes weights as safetensors files of bounded size, one tensor at a time."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def write_weights(
    directory: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    expected: Mapping[str, torch.Size],
    prefix: str,
    dtype: str,
    max_shard_bytes: int,
) -> int:
    """Writes model.safetensors, or model-00001-of-0000N.safetensors with an index; returns the bytes written.

    Memory stays bounded by one file. A tensor larger than `max_shard_bytes` has a file of its own.

    tensors: names and tensors in any order; expected: those that there must be, whose names get a prefix; dtype: one of
    `DTYPES`, for floating-point tensors. Raises ValueError naming the first name that is missing, unknown, of another
    shape, or not finite, and OSError (one line) where the disk is full.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be at least 1")
    parts: list[tuple[Path, list[str]]] = []
    pending: dict[str, torch.Tensor] = {}
    missing, size, total = dict(expected), 0, 0
    for name, tensor in tensors:
        if name not in expected:
            raise ValueError(f"the weights hold {name!r}, which the configured model does not have")
        if tensor.shape != expected[name]:
            raise ValueError(
                f"the weights hold {name!r} with shape {tuple(tensor.shape)}, "
                f"but the configured model has {tuple(expected[name])}"
            )
        missing.pop(name, None)
        kept = DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * kept.itemsize
        if pending and size + nbytes > max_shard_bytes:
            parts.append(_save(directory / f"part-{len(parts) + 1:05d}.safetensors", pending))
            size = 0
        converted = tensor.detach().to("cpu", kept).contiguous()
        if converted.untyped_storage().nbytes() > nbytes:
            converted = converted.clone()  # not a part of something larger, which would stay in memory
        if not converted.isfinite().all():
            why = f"it leaves the range of {dtype}" if tensor.isfinite().all() else "the weights have diverged"
            raise ValueError(f"{name} is not finite: {why}")
        pending[prefix + name] = converted
        size, total = size + nbytes, total + nbytes
    if missing:
        first = next(iter(missing))
        raise ValueError(f"the weights lack {first!r} ({len(missing)} of {len(expected)} tensors are missing)")
    parts.append(_save(directory / f"part-{len(parts) + 1:05d}.safetensors", pending))
    # The names that transformers expects hold the number of files, known only now.
    if len(parts) == 1:
        parts[0][0].rename(directory / "model.safetensors")
        return total
    weight_map = {}
    for number, (part, names) in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        part.rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def _save(file: Path, tensors: dict[str, torch.Tensor]) -> tuple[Path, list[str]]:
    """Writes tensors and forgets them; returns the file and their names."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # the library's own kind also for what the disk refuses
        raise OSError(f"{file} cannot be written: {str(error).partition(chr(10))[0]}") from None
    file.chmod(0o644)  # safetensors writes files that only their owner can read
    names = list(tensors)
    tensors.clear()
    return file, names
