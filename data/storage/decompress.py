"""Decompresses a zstd shard into a file, no further than it may go."""

from __future__ import annotations

import hashlib
from pathlib import Path

# What comes out is handed over in pieces of this size, however much of it the input asks for.
_PIECE = 1 << 20


def decompress(source: Path, target: Path, largest: int) -> tuple[int, str]:
    """Writes what `source` holds to `target`; gives its size and SHA-256.

    Raises ValueError (a few words) where it is damaged or holds more than `largest` bytes; `target` is to be removed
    then. Frames with a window above zstd's own default limit (128 MiB) are refused.
    """
    import zstandard

    digest, size = hashlib.sha256(), 0
    try:
        with source.open("rb") as compressed, target.open("wb") as raw:
            decoder = zstandard.ZstdDecompressor()
            for chunk in decoder.read_to_iter(compressed, write_size=_PIECE):
                size += len(chunk)
                if size > largest:
                    raise ValueError(f"decompresses to more than {largest:,} bytes, which is all that it may hold")
                digest.update(chunk)
                raw.write(chunk)
    except zstandard.ZstdError as error:
        raise ValueError(f"does not decompress ({error})") from None
    return size, digest.hexdigest()
