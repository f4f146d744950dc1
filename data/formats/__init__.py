"""Formats of shards by name. To add one: write its file (a `ShardFormat`), and add its line here.

A name in a manifest may come from anybody: it is looked up here, and nothing is imported for it.
"""

from matmix.data.formats.base import ShardFormat
from matmix.data.formats.mds import Mds
from matmix.data.formats.webdataset import WebDataset

FORMATS: dict[str, type[ShardFormat]] = {
    "mds": Mds,
    "webdataset": WebDataset,
}


def make_format(name: str, *, dtype: str, compression: str, megabytes: float, prefix: str = "") -> ShardFormat:
    """The format that `--format`, `--compression` and `--shard-megabytes` ask for. prefix: see `ShardFormat`."""
    packed = None if compression == "none" else "zstd"
    return FORMATS[name](dtype=dtype, compression=packed, size_limit=int(megabytes * (1 << 20)), prefix=prefix)
