"""WebDataset: tar files with one member `<number>.npy` for each document.

An uncompressed shard is read by webdataset as it is. Python's tarfile knows no zstd before 3.14, so
webdataset reads a compressed one through a pipe: ``WebDataset("pipe:zstd -dc
DIR/train/shard-00000.tar.zst")``.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from matmix.data.formats.writing import Shard, ShardFormat

_BLOCK = 512


class WebDatasetFormat(ShardFormat):
    """Members are arrays (n,) as written by numpy.save; the number is the document's in the split (in its part of the
    split, after a `prefix` that names the part).
    """

    name = "webdataset"
    compressed_suffix = ".zst"
    shard_overhead = 2 * _BLOCK

    def __init__(self, *, dtype: str, compression: Literal["zstd"] | None, size_limit: int, prefix: str = "") -> None:
        super().__init__(dtype=dtype, compression=compression, size_limit=size_limit)
        self.prefix = prefix

    def file_name(self, shard: int) -> str:
        return f"shard-{shard:05}.tar"

    def document_bytes(self, tokens: int) -> int:
        # numpy pads its header to a multiple of 64; for one axis and these types it is 128 bytes.
        content = 128 + tokens * self.dtype.itemsize
        return _BLOCK + -(-content // _BLOCK) * _BLOCK

    def encode(self, documents: list[np.ndarray], first: int) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for number, tokens in enumerate(documents, start=first):
                content = io.BytesIO()
                np.save(content, tokens, allow_pickle=False)
                # The defaults of TarInfo (time 0, no owner) make the bytes depend on the tokens only.
                member = tarfile.TarInfo(f"{self.prefix}{number:010}.npy")
                member.size = content.tell()
                content.seek(0)
                tar.addfile(member, content)
        return buffer.getvalue()

    def index(self, shards: list[Shard]) -> dict[str, Any]:
        return {"version": 1, "shards": [asdict(s) for s in shards]}
