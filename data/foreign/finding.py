"""Finds out what a path of the config leads to, and opens the shards that others made there."""

from __future__ import annotations

from matmix.data.config import DataConfig
from matmix.data.foreign.mds import MdsShards
from matmix.data.foreign.shards import Shards
from matmix.data.foreign.tars import TarShards
from matmix.data.manifest import MANIFEST_NAME
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
            return opener(place, found, data, split)
    table = "data.images" if data.images.path else "data"
    if not whole:
        raise ValueError(
            f"{path} has no folder {' or '.join(folders)} with {opener.kind}, to validate with: set "
            f"{table}.validation_path"
        )
    raise FileNotFoundError(f"{path} holds no {opener.kind}, which data.reader = {data.reader!r} reads ({opener.need})")
