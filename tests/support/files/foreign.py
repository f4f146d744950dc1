"""Datasets as other libraries write them, without importing these."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import zstandard
from pyarrow import parquet

SIZES = {"int": 8, "uint8": 1}


def write_mds(
    folder: Path, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, shards: int = 2, zstd: bool = False
) -> Path:
    """Writes what streaming's MDSWriter writes with one size limit for all shards."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "version": 2,
        "format": "mds",
        "compression": "zstd" if zstd else None,
        "hashes": [],
        "size_limit": 1 << 26,
        "column_names": sorted(columns),
        "column_encodings": [columns[name] for name in sorted(columns)],
        "column_sizes": [SIZES.get(columns[name]) for name in sorted(columns)],
    }
    inside = json.dumps(config, sort_keys=True).encode()
    entries = []
    for shard in range(shards):
        chosen = rows[len(rows) * shard // shards : len(rows) * (shard + 1) // shards]
        samples = []
        for row in chosen:
            raw = [_encoded(row[name], columns[name]) for name in sorted(columns)]
            sizes = [
                np.uint32(len(r)).tobytes() for r, size in zip(raw, config["column_sizes"], strict=True) if not size
            ]
            samples.append(b"".join(sizes + raw))
        offsets = np.cumsum([0, *map(len, samples)]) + 4 + 4 * (len(samples) + 1) + len(inside)
        data = np.uint32(len(samples)).tobytes() + offsets.astype("<u4").tobytes() + inside + b"".join(samples)
        name = f"shard.{shard:05}.mds"
        packed = zstandard.compress(data) if zstd else data
        (folder / (name + ".zstd" * zstd)).write_bytes(packed)
        files = {
            "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
            "zip_data": {"basename": f"{name}.zstd", "bytes": len(packed), "hashes": {}} if zstd else None,
        }
        entries.append({**config, "samples": len(samples), **files})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}, sort_keys=True))
    return folder


def _encoded(value: Any, encoding: str) -> bytes:
    if encoding == "str":
        return value.encode()
    return np.int64(value).tobytes() if encoding == "int" else value


def write_table(path: Path, table: pyarrow.Table, *, stream: bool = True, rows: int = 7) -> Path:
    """Writes a .parquet file, or an .arrow file in the stream format or the file format, in groups of so many rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=rows)
    else:
        new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


def save_to_disk(folder: Path, table: pyarrow.Table, files: int = 2) -> Path:
    """Writes what `Dataset.save_to_disk` of datasets 5.2 writes."""
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    for number, name in enumerate(names):
        begin, end = (len(table) * n // files for n in (number, number + 1))
        write_table(folder / name, table.slice(begin, end - begin))
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def write_tar(path: Path, members: Mapping[str, bytes | str]) -> Path:
    """Writes a tar file with these members, such as webdataset's TarWriter."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            raw = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return path
