"""Finds what is wrong with a checkpoint: files and checksums, tensors that its layout does not name, another model."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matmix.train.checkpoint.lanes import SUBDIRECTORY as CARRIED
from matmix.train.checkpoint.manifest import OF_DAMAGE, check_sizes, matches, read_manifest
from matmix.train.engine.kinds import files_of, open_full
from matmix.train.process.distributed import agree, rank_and_world_size


def find_problem(directory: Path, *, weights_only: bool = False) -> str | None:
    """Says on every rank what is wrong with a checkpoint: sizes, checksums, or tensors other than its layout names. The
    ranks share the reading. weights_only: looks at the files alone that are read for the weights. Raises OSError on
    every rank where one could not look (a file system that is away, too many open files): who took such a checkpoint
    for damaged would go back behind it and remove it."""
    rank, world_size = rank_and_world_size()

    def look() -> str | None:
        try:
            manifest = read_manifest(directory)
            files, layout = manifest["files"], manifest["layout"]
            names = weight_files(layout, files) if weights_only else list(files)
            check_sizes(directory, names)
            for name in names[rank::world_size]:
                if not matches(directory / name, files[name]):
                    return f"checkpoint {directory} is damaged: {name} does not match its checksum"
            if rank == 0:
                open_full(directory, layout, weights_only=weights_only)
        except (ValueError, FileNotFoundError) as error:
            return str(error)
        except OSError as error:
            if error.errno not in OF_DAMAGE:
                raise OSError(f"checkpoint {directory} cannot be read: {error}") from error
            return f"checkpoint {directory} is damaged: {error}"
        return None

    return next(filter(None, agree(look)), None)


def weight_files(layout: Mapping[str, Any], files: Iterable[str]) -> list[str]:
    """Returns those of a checkpoint's `files` that must be read for its weights."""
    return [
        name for name in files_of(layout["engine"]).weight_files(layout, files) if not name.startswith(f"{CARRIED}/")
    ]


def check_shapes(directory: Path, saved: dict[str, list[int]], model: dict[str, list[int]]) -> None:
    """Raises ValueError that names the first tensor on which checkpoint and model differ."""
    for name in (*model, *saved):
        here, there = (None if name not in shapes else tuple(shapes[name]) for shapes in (model, saved))
        if here == there:
            continue
        problem = f"{name} is {there} there and {here} in this model"
        if there is None:
            problem = f"it has no {name}, which is {here} in this model"
        elif here is None:
            problem = f"it holds {name} {there}, which this model does not have"
        raise ValueError(f"checkpoint {directory} is of another architecture: {problem}")
