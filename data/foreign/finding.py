"""Finds out what a path of the config leads to, and opens the shards that others made there."""

from __future__ import annotations

from pathlib import Path

from matmix.data.config import DataConfig
from matmix.data.foreign.mds import MdsShards
from matmix.data.foreign.shards import Shards
from matmix.data.foreign.tars import TarShards
from matmix.data.manifest import MANIFEST_NAME
from matmix.data.prepare.streams import is_stream
from matmix.data.storage.storage import read_small

_SPLITS = {"train": ("", "train"), "validation": ("validation", "val")}


def is_foreign(path: str, reader: str) -> bool:
    """Returns whether a path of the config leads to no prepared dataset. Raises as `download`."""
    if reader == "addressable" or not path:
        return False
    if path.startswith("pipe:"):
        raise ValueError("data.path: the command of a pipe is run by `matmix prepare` only; name files or a URL")
    if ".tar" in path or "{" in path:
        return True
    return read_small(path, MANIFEST_NAME) is None


def open_shards(data: DataConfig, path: str, split: str) -> Shards:
    """Opens the shards of a split: in `path` itself or its folder `train`, or, unless `path` is the place named for
    validation, in its folder `validation` or `val`. Raises FileNotFoundError, ValueError, OSError (one line)."""
    config = data.images if data.images.path else data
    opener = MdsShards if data.reader == "streaming" else TarShards
    whole = split == "train" or path == config.validation_path
    folders = _SPLITS["train" if whole else "validation"]
    places = [path.rstrip("/") + f"/{folder}" if folder else path for folder in folders]
    if opener is TarShards and "{" in path:
        places = [path] if whole else []
    for place in places:
        if (found := opener.find(place)) is not None:
            if opener is TarShards and split == "train" and config.validation_path not in ("", path):
                _check_apart(place, found, config.validation_path)
            return opener(place, found, data, split)
    table = "data.images" if data.images.path else "data"
    if not whole:
        raise ValueError(
            f"{path} has no folder {' or '.join(folders)} with {opener.kind}, to validate with: set "
            f"{table}.validation_path"
        )
    raise FileNotFoundError(f"{path} holds no {opener.kind}, which data.reader = {data.reader!r} reads ({opener.need})")


def _check_apart(place: str, files: list[str], validation_path: str) -> None:
    """Raises ValueError (one line) where some of the files to train on are those to validate with."""
    train, validation = (
        {file if is_stream(file) else str(Path(file).resolve()) for file in some}
        for some in (files, TarShards.find(validation_path) or ())
    )
    if both := sorted(train & validation):
        raise ValueError(
            f"{place} holds {both[0].rpartition('/')[2]}, which is to train on, and {validation_path} names it to "
            "validate with: name the files to train on, as FOLDER/train-{000..009}.tar"
        )
