"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

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


def sync_directory(directory: Path) -> None:
    """Make renames inside a directory last."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
