"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path


def write_atomic(path: Path, data: bytes | Iterable[bytes], *, alone: bool = True) -> None:
    """Write under a temporary name beside `path`, flush to the disk, rename. The temporary name is always the
    same, so that stopped attempts do not pile up, unless other processes may write the same file now (not `alone`).
    """
    writer = "" if alone else f".{socket.gethostname()}-{os.getpid()}"
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    with open(temporary, "wb") as file:
        for part in [data] if isinstance(data, bytes) else data:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Bring what was written to a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make renames inside a directory last."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
