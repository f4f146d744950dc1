"""Files that are there whole or not at all, also after a power cut. (Standard library only, for launchers.)"""

import contextlib
import hashlib
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO


def write_atomic(path: Path, content: str | bytes | Iterable[bytes], *, alone: bool = True) -> None:
    """Writes text (UTF-8) or bytes under another name beside `path`, brings them to the disk, and renames. alone: no
    other process writes this file now, so the other name is always the same: stopped attempts do not pile up."""
    writer = "" if alone else f".{socket.gethostname()}-{os.getpid()}"
    temporary = path.with_name(f".{path.name}{writer}.tmp")
    content = content.encode() if isinstance(content, str) else content
    with open_durable(temporary) as file:
        for part in [content] if isinstance(content, bytes) else content:
            file.write(part)
    os.replace(temporary, path)
    sync_directory(path.parent)


@contextlib.contextmanager
def open_durable(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file to write to; at the end of the block its content is on the disk. Errors name the file."""
    with errors_name(path), path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Makes errors of the operating system that name no file, such as that of a full disk, name this one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sync_file(path: Path) -> None:
    """Brings what was written to a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Makes renames inside a directory survive a power failure, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def first_free(path: Path, is_taken: Callable[[Path], bool] = Path.exists, again: str = "-") -> Path:
    """Returns `path`, or the first free one with -2, -3 ... after its stem. again: stands before the number."""
    paths = itertools.chain([path], (path.with_stem(f"{path.stem}{again}{number}") for number in itertools.count(2)))
    return next(free for free in paths if not is_taken(free))


def set_aside(path: Path) -> Path:
    """Renames a file to NAME.aside-1, or the first such number that is free, and returns the new path."""
    names = (path.with_name(f"{path.name}.aside-{number}") for number in itertools.count(1))
    return path.rename(next(aside for aside in names if not aside.exists()))


def sha256_of(path: Path, offset: int = 0, size: int | None = None) -> str:
    """Returns the SHA-256 of a file in hexadecimal, or of `size` bytes of it from `offset` on."""
    with path.open("rb") as file:
        if size is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(offset)
        digest = hashlib.sha256()
        while size > 0 and (piece := file.read(min(size, 1 << 20))):
            digest.update(piece)
            size -= len(piece)
        return digest.hexdigest()
