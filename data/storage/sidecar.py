"""What the cache notes beside a decompressed shard of a dataset whose manifest says only the compressed one's digest.

The note holds the digest of the decompressed bytes, taken while the verified compressed shard was read, and that of the
compressed one, to which it belongs. Damage to the copy or to the note makes them disagree; then the copy is made again.
"""

from __future__ import annotations

from pathlib import Path

from matmix.data.manifest import ShardInfo
from matmix.data.storage.files import write_atomic


def write(copy: Path, shard: ShardInfo, digest: str) -> None:
    """Notes the digest of the decompressed bytes, before `copy` gets its name."""
    write_atomic(note_of(copy), f"{digest} {shard.sha256}\n".encode())


def read(copy: Path, shard: ShardInfo) -> str | None:
    """The digest that `copy` should have, None where there is no note of this shard."""
    try:
        digest, of = note_of(copy).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return digest if of == shard.sha256 else None


def note_of(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.sha256")
