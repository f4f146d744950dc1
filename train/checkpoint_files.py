"""What makes a directory a valid checkpoint: its last file, `checkpoint.json`, and that all others are as it
says.

The file is written after everything else and the directory gets its name after that, so that a directory
named `step-00001000` with this file in it was written whole; sizes and checksums tell if something happened
to it later.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from matmix.train.distributed import gather_objects, rank_and_world_size
from matmix.train.heartbeat import beat, others_at_work

MANIFEST = "checkpoint.json"
VERSION = 1
_CHUNK = 1 << 22
# What reading says where the medium or the file system has lost the file's content.
_OF_DAMAGE = (errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO))


def together(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> str | None:
    """Runs `action` on every rank; None, or the first rank's complaint if storage failed anywhere, on every
    rank.

    Only OSError is a complaint. Anything else is a mistake of ours and raised, on every rank. group: what the
    ranks agree over, as for `gather_objects`.
    """
    complaint, mistake = None, None
    beat("a part of a save")
    try:
        action()
    except OSError as error:
        complaint = error.strerror or str(error)
    except Exception as error:
        mistake = error
    with others_at_work("a part of a save that is done here"):
        outcomes = gather_objects((complaint, None if mistake is None else repr(mistake)), group)
    if mistake is not None:
        raise mistake
    for rank, (text, other) in enumerate(outcomes):
        if other is not None:
            raise RuntimeError(f"rank {rank} failed: {other}")
        if text is not None:
            return text if "(rank " in text or len(outcomes) == 1 else f"{text} (rank {rank})"
    return None


def list_files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def describe_files(directory: Path, names: list[str]) -> dict[str, list[int]]:
    """Size and CRC-32 of files below `directory`."""
    return {name: [(directory / name).stat().st_size, checksum(directory / name)] for name in names}


def checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
            beat("reading a checkpoint")
    return value


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"version": VERSION, **manifest}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises FileNotFoundError or ValueError."""
    if not directory.is_dir():
        raise FileNotFoundError(f"checkpoint not found: {directory}")
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        known = manifest["version"] == VERSION and isinstance(manifest["files"], dict)
    except FileNotFoundError:
        raise ValueError(f"checkpoint {directory} is not valid: it has no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"checkpoint {directory} is damaged: its {MANIFEST} cannot be read") from None
    if not known:
        raise ValueError(f"checkpoint {directory} was written by another version of matmix: update one of the two")
    return manifest


def check_sizes(directory: Path) -> None:
    """Raises ValueError if a file is missing or not as long as it was."""
    for name, (size, _) in read_manifest(directory)["files"].items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"checkpoint {directory} is damaged: {name} is missing")
        if (found := path.stat().st_size) != size:
            how = "truncated" if found < size else "too long"
            raise ValueError(f"checkpoint {directory} is damaged: {name} is {how} ({found} of {size} bytes)")


def find_problem(directory: Path) -> str | None:
    """What is wrong with a checkpoint, sizes and checksums, on every rank; the ranks share the reading.

    Raises OSError on every rank where one could not look (a file system that is away, too many open files): who took
    such a checkpoint for damaged would go back behind it and remove it.
    """
    rank, world_size = rank_and_world_size()

    def look() -> str | OSError | None:
        try:
            check_sizes(directory)
            files = read_manifest(directory)["files"]
            for name, (_, value) in list(files.items())[rank::world_size]:
                if checksum(directory / name) != value:
                    return f"checkpoint {directory} is damaged: {name} does not match its checksum"
        except (ValueError, FileNotFoundError) as error:
            return str(error)
        except OSError as error:
            if error.errno not in _OF_DAMAGE:
                return OSError(f"checkpoint {directory} cannot be read: {error}")
            return f"checkpoint {directory} is damaged: {error}"
        return None

    found = gather_objects(look())
    for problem in found:
        if isinstance(problem, OSError):
            raise problem
    return next((problem for problem in found if problem), None)


def check_shapes(directory: Path, saved: dict[str, list[int]], model: dict[str, list[int]]) -> None:
    """Raises ValueError that names the first tensor on which checkpoint and model differ."""
    start = f"checkpoint {directory} is of another architecture:"
    for name, shape in model.items():
        if name not in saved:
            raise ValueError(f"{start} it has no {name}, which is {tuple(shape)} in this model")
        if list(saved[name]) != list(shape):
            raise ValueError(f"{start} {name} is {tuple(saved[name])} there and {tuple(shape)} in this model")
    for name, shape in saved.items():
        if name not in model:
            raise ValueError(f"{start} it holds {name} {tuple(shape)}, which this model does not have")


def sync_directory(directory: Path) -> None:
    """Makes a rename inside `directory` survive a power failure, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
