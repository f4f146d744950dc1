"""The weights in a checkpoint, as those who export it read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from matmix.train.checkpoint.files import find_problem
from matmix.train.checkpoint.manifest import read_manifest
from matmix.train.engine.kinds import open_full


def read_weights(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and full CPU tensor of the weights and persistent buffers. Raises ValueError for a damaged one."""
    path = Path(path)
    if (problem := find_problem(path)) is not None:
        raise ValueError(problem)
    yield from open_full(path, read_manifest(path)["layout"]).weights()
