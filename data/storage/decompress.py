"""Decompresses a zstd shard into a file, no further than it may go, and notes beside it what its bytes were.

A manifest may say only the compressed shard's digest. The note holds the digest of the decompressed bytes, taken while
the verified compressed shard was read, and that of the compressed one, to which it belongs. Damage to the copy or to
the note makes them disagree; then the copy is made again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from matmix.data.manifest import ShardInfo
from matmix.data.storage.files import write_atomic

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


def note_digest(copy: Path, shard: ShardInfo, digest: str) -> None:
    """Notes the digest of the decompressed bytes, before `copy` gets its name."""
    write_atomic(note_of(copy), f"{digest} {shard.sha256}\n")


def noted_digest(copy: Path, shard: ShardInfo) -> str | None:
    """The digest that `copy` should have, None where there is no note of this shard."""
    try:
        digest, of = note_of(copy).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return digest if of == shard.sha256 else None


def note_of(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.sha256")
