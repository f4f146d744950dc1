"""A run as one of its checkpoints has it: for those who look at, export or convert what was trained."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from matmix.data.storage.storage import Storage
from matmix.data.tokenizer import Tokenizer
from matmix.train.checkpoint.files import find_problem, read_manifest
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.config import RunConfig
from matmix.train.engine.full_state import Weights
from matmix.train.engine.kinds import open_weights
from matmix.train.run.directory import RunDirectory, check_tokenizer
from matmix.train.run.remote import fetch_run
from matmix.train.state import check_extra

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run, and one of its checkpoints."""

    run: RunDirectory
    checkpoint: Path
    config: RunConfig
    manifest: dict[str, Any]
    """What the checkpoint says of itself. Its files were compared with that."""
    which: Weights = "raw"
    """Of the checkpoint's weights."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full CPU tensor of the weights and persistent buffers, one at a time."""
        return open_weights(self.checkpoint, self.manifest["layout"], self.which).weights()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The copy in RUN/tokenizer, or that of the dataset. Raises ValueError if it is not the checkpoint's."""
        if (copy := self.run.path / "tokenizer").is_dir():
            tokenizer = Tokenizer.load(copy)
        else:
            path = self.config.data.path or next(iter(self.config.data.mixture), "")
            storage = Storage(path, self.config.data.cache_dir)
            tokenizer = Tokenizer.load(storage.file(storage.manifest.tokenizer.file))
        check_tokenizer(self.manifest["extra"], tokenizer, self.checkpoint)
        return tokenizer


def open_trained(
    run: str | Path, step: int | None = None, *, weights_only: bool = True, weights: Weights = "raw"
) -> Trained:
    """`find_trained` in a run directory or at a run's URL, from which the files that are needed are fetched."""
    folder, fetched = fetch_run(run, step=step, weights_only=weights_only and weights == "raw")
    return find_trained(RunDirectory(folder), step, weights_only=weights_only, whole=fetched, weights=weights)


def find_trained(
    run: RunDirectory,
    step: int | None = None,
    *,
    weights_only: bool = True,
    whole: Path | None = None,
    weights: Weights = "raw",
) -> Trained:
    """The checkpoint of `step`, or the newest valid one, with what it was trained with.

    A message says where config.toml was edited in ways that a run may change. weights_only: reads and compares no
    files but those that must be read for the weights. whole: the checkpoint, where that was found whole already.
    weights: those that `Trained.weights` gives. Raises FileNotFoundError or ValueError (one line) if there is no such
    checkpoint, or the run's config is not the checkpoint's.
    """
    config = run.read_config()
    checkpoint = whole or _find_whole(run, step, weights_only and weights == "raw")
    manifest = read_manifest(checkpoint)
    check_extra(manifest["extra"], checkpoint)
    if changes := run.changes_since(manifest["extra"], config):
        listed = ", ".join(f"{key} {old} -> {new}" for key, old, new in changes)
        logger.info(f"config.toml has changed since {checkpoint.name}: {listed}")
    trained = Trained(run, checkpoint, config, manifest, weights)
    if weights != "raw":
        open_weights(checkpoint, manifest["layout"], weights)  # says now where there are none
    return trained


def _find_whole(run: RunDirectory, step: int | None, weights_only: bool) -> Path:
    """The checkpoint of `step`, or the newest valid one. Raises ValueError if there is none, or it is damaged."""
    manager = CheckpointManager(run.checkpoints)
    if step is None:
        checkpoint = manager.latest_valid(weights_only=weights_only)
        if checkpoint is None:
            raise ValueError(f"{run.path} has no checkpoint yet; train it first")
        return checkpoint
    if step not in manager.steps():
        steps = ", ".join(map(str, manager.steps())) or "none"
        raise ValueError(f"{run.path} has no checkpoint of step {step}; there are: {steps}")
    if (problem := find_problem(manager.path(step), weights_only=weights_only)) is not None:
        raise ValueError(problem)
    return manager.path(step)
