"""Formats of shards by name: to add one, write its `ShardFormat` and add its line here. A name in a manifest may come
from anybody: it is looked up here, and nothing is imported for it."""

from collections.abc import Mapping
from typing import Any

from matmix.data.formats.base import ReadFormat, ShardFormat
from matmix.data.formats.in_place import InPlace
from matmix.data.formats.mds import Mds
from matmix.data.formats.webdataset import WebDataset

FORMATS: dict[str, type[ShardFormat]] = {"mds": Mds, "webdataset": WebDataset}
READ_ONLY: dict[str, type[ReadFormat]] = {"in_place": InPlace}
"""Formats whose shards are stretches of files that others have written."""


def format_of(name: str) -> type[ReadFormat]:
    """Returns the format that a manifest names."""
    return READ_ONLY.get(name) or FORMATS[name]


def make_format(options: Mapping[str, Any], dtype: str, prefix: str = "") -> ShardFormat:
    """Returns the format of the options format, compression and shard_megabytes. prefix: see `ShardFormat`."""
    packed = None if options["compression"] == "none" else "zstd"
    size_limit = int(options["shard_megabytes"] * (1 << 20))
    return FORMATS[options["format"]](dtype=dtype, compression=packed, size_limit=size_limit, prefix=prefix)
