"""Tar files that are not of this machine: at a URL, or what a command prints (`pipe:COMMAND`, as webdataset has it)."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from matmix.data.prepare.base import braces
from matmix.data.storage.remote import RemoteError, RemoteFolder, first_line, is_url, scratch_folder

logger = logging.getLogger(__name__)

_PIPE = "pipe:"
# What a pipe counts as among other inputs, as nobody knows its size.
_PIPE_BYTES = 1 << 26
_ENDS = 1 << 16


def is_stream(item: str) -> bool:
    """Returns whether an argument names files that are not of this machine."""
    return item.startswith(_PIPE) or is_url(item)


def find_streams(item: str) -> list[tuple[str, int]]:
    """Returns the URLs or pipes, and their bytes, that an argument with lists in braces names. Raises ValueError (one
    line) for a URL of anything but tar files, FileNotFoundError and RemoteError as `RemoteFolder`."""
    found = []
    for one in braces(item):
        if one.startswith(_PIPE):
            found.append((one, _PIPE_BYTES))
            continue
        folder, _, name = one.rpartition("/")
        if not name.endswith(".tar"):
            raise ValueError(f"{one} is a URL, and of those prepare reads .tar files only: download it first")
        found.append((one, RemoteFolder(folder).size(name)))
    return found


@contextmanager
def open_stream(url: str) -> Iterator[IO[bytes]]:
    """Opens a stream from its beginning. Raises OSError where the command of a pipe fails; a reader that stops before
    the end stops the command as well, and no error comes of that."""
    if not url.startswith(_PIPE):
        folder, _, name = url.rpartition("/")
        with RemoteFolder(folder).open(name) as file:
            yield file
        return
    from webdataset.gopen import gopen_pipe  # imports torch

    with gopen_pipe(url) as stream:
        stream.ignore_errors = True  # its own error tells the arguments of a function
        try:
            yield stream
        finally:
            ended = not stream.read(1)
            stream.close()
            if ended and stream.status:
                raise OSError(f"the command ended with code {stream.status}")


def stream_digest(url: str, size: int) -> str:
    """Returns what `Source.digest` does. Of a pipe it is that of its command, which is not run for it."""
    if url.startswith(_PIPE):
        return hashlib.sha256(url.encode()).hexdigest()
    hashed = hashlib.sha256(str(size).encode())
    with open_stream(url) as file:
        hashed.update(file.read(_ENDS))
        file.seek(max(0, size - _ENDS))
        hashed.update(file.read(_ENDS))
    return hashed.hexdigest()


def fetch_stream(url: str, size: int) -> Path:
    """Returns a copy of a stream below MATMIX_SCRATCH, for sources that are read in any order; one of an earlier call
    is taken if its size is right. size: as `find_streams` tells. Raises RemoteError, ValueError (one line)."""
    path = scratch_folder("sources", url) / "copy.tar"
    if path.is_file() and (url.startswith(_PIPE) or path.stat().st_size == size):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"part-{os.getpid()}")
    logger.info(f"copying {url} to {path}")
    try:
        with open_stream(url) as stream, part.open("wb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
        os.replace(part, path)
    except RemoteError:
        raise
    except OSError as error:
        raise ValueError(f"{url} cannot be read: {first_line(error)}") from error
    finally:
        part.unlink(missing_ok=True)
    return path
