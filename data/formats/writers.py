"""Writers of shards: MDS and WebDataset behind one interface."""

from __future__ import annotations

from typing import Literal

from matmix.data.formats.mds_writer import MdsFormat
from matmix.data.formats.webdataset_writer import WebDatasetFormat
from matmix.data.formats.writing import DamagedPreparationError, Shard, ShardFormat, SplitWriter
from matmix.data.storage.files import write_atomic

__all__ = [
    "DamagedPreparationError",
    "MdsFormat",
    "Shard",
    "ShardFormat",
    "SplitWriter",
    "WebDatasetFormat",
    "make_format",
    "write_atomic",
]


def make_format(
    name: str, *, dtype: Literal["uint16", "uint32"], compression: str, megabytes: float, prefix: str = ""
) -> ShardFormat:
    """The format that `--format`, `--compression` and `--shard-megabytes` ask for. prefix: put before the names of
    documents, where the format has such (WebDataset).
    """
    options = {
        "dtype": dtype,
        "compression": None if compression == "none" else "zstd",
        "size_limit": int(megabytes * (1 << 20)),
    }
    return MdsFormat(**options) if name == "mds" else WebDatasetFormat(**options, prefix=prefix)
