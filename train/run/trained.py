"""Runs for those who look at, export or convert what was trained, as one of their checkpoints has them."""

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from matmix.data.storage.remote import is_url
from matmix.data.storage.storage import Storage
from matmix.data.tokenizer import Tokenizer
from matmix.train.checkpoint.files import find_problem
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.manifest import read_manifest
from matmix.train.checkpoint.steps import remove_checkpoint, step_of
from matmix.train.config import RunConfig
from matmix.train.engine.kinds import open_weights
from matmix.train.run.directory import RunDirectory, check_tokenizer
from matmix.train.run.outcome import local_folder
from matmix.train.run.sync import CHECKPOINTS, RunSync
from matmix.train.state import Weights, check_extra

logger = logging.getLogger(__name__)


class _Reader(RunSync):
    """A folder with what this process has read of a run at a URL, its own until it ends: nobody else changes it."""

    def __init__(self, url: str, use: str) -> None:
        """use: a part of the folder's name. Processes that read at the same time have a folder each."""
        for number in itertools.count():
            folder = local_folder(url, f"{use}-{number}" if number else use)
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(folder.with_name(f"{folder.name}.lock"))
            with contextlib.suppress(Timeout):
                self.lock.acquire(blocking=False)
                break
        super().__init__(url, folder)
        self.steps: set[int] = set()  # of the checkpoints that this process has asked for

    def update(self) -> None:
        """Brings the records to where they are at the URL. Raises FileNotFoundError where there is no run."""
        self.forget_records()
        if self.remote.read("config.toml") is None and self.remote.read("config.json") is None:
            raise FileNotFoundError(f"there is no run at {self.url}")
        self.pull_records()

    def forget_checkpoints(self) -> None:
        """Removes those that this process has not asked for."""
        for path in list((self.folder / CHECKPOINTS).glob("*")):
            if step_of(path.name) not in self.steps:
                remove_checkpoint(path)


_reader = functools.cache(_Reader)  # one for each run and use in a process


def fetch_run(run: str | Path, *, step: int | None = None, weights_only: bool = False) -> tuple[Path, Path | None]:
    """Returns a run directory to read from, `run` itself or for a URL a copy, which stays as it is for as long as this
    process runs, and in a copy its checkpoint, whole, if there is one. step: which checkpoint; None = the newest valid
    one. weights_only: without the files that need not be read for the weights. Raises FileNotFoundError if there is
    nothing at the URL, ValueError if there is no such checkpoint or it is damaged, RemoteError where the store fails.
    """
    if not is_url(run):
        return Path(run), None
    reader = _reader(str(run), "reader")
    reader.update()
    steps = reader.remote_steps()
    if step is not None:
        _check_step(step, steps, reader.url)
    wanted = [step] if step is not None else list(reversed(steps))
    for candidate in wanted:
        if (problem := reader.pull(candidate, weights_only=weights_only)) is None:
            reader.steps.add(candidate)
            reader.forget_checkpoints()
            return reader.folder, reader.path(candidate)
        if candidate == wanted[-1]:
            raise ValueError(problem)
        logger.warning(f"skipping a checkpoint: {problem}")
    return reader.folder, None


def local_outline(run: str | Path, *, whole: bool = False) -> Path:
    """Returns a run directory as `fetch_run` does, with all checkpoints as `RunSync.outline` puts them there."""
    if not is_url(run):
        return Path(run)
    reader = _reader(str(run), "outline")
    reader.update()
    reader.forget_checkpoints()
    reader.outline(whole)
    return reader.folder


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run, and one of its checkpoints."""

    run: RunDirectory
    checkpoint: Path
    config: RunConfig
    manifest: dict[str, Any]
    """The checkpoint's `checkpoint.json`. Its files were compared with that."""
    which: Weights = "raw"
    """The weights of the checkpoint that are taken."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and full CPU tensor of the weights and persistent buffers, one at a time."""
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
    run: str | Path,
    step: int | None = None,
    *,
    weights_only: bool = True,
    weights: Weights = "raw",
    whole: Path | None = None,
) -> Trained:
    """Returns the checkpoint of `step`, or the newest valid one, of a run (a folder, or a URL, of which the files that
    it needs are fetched), with what it was trained with. A message says where config.toml was edited in ways that a run
    may change.

    weights_only: reads and compares the files alone that must be read for the weights. weights: those that
    `Trained.weights` gives. whole: the checkpoint, where that was found whole already. Raises FileNotFoundError or
    ValueError (one line) if there is no such checkpoint, or the run's config is not the checkpoint's.
    """
    weights_only = weights_only and weights == "raw"
    folder, fetched = fetch_run(run, step=step, weights_only=weights_only)
    directory = RunDirectory(folder)
    config = directory.read_config()
    checkpoint = whole or fetched or _find_whole(directory, step, weights_only)
    manifest = read_manifest(checkpoint)
    check_extra(manifest["extra"], checkpoint)
    if changes := directory.changes_since(manifest["extra"], config):
        listed = ", ".join(f"{key} {old} -> {new}" for key, old, new in changes)
        logger.info(f"config.toml has changed since {checkpoint.name}: {listed}")
    if weights != "raw":
        open_weights(checkpoint, manifest["layout"], weights)  # says now where there are none
    return Trained(directory, checkpoint, config, manifest, weights)


def _find_whole(run: RunDirectory, step: int | None, weights_only: bool) -> Path:
    manager = CheckpointManager(run.checkpoints)
    if step is None:
        checkpoint = manager.latest_valid(weights_only=weights_only)
        if checkpoint is None:
            raise ValueError(f"{run.path} has no checkpoint yet; train it first")
        return checkpoint
    _check_step(step, manager.steps(), run.path)
    if (problem := find_problem(manager.path(step), weights_only=weights_only)) is not None:
        raise ValueError(problem)
    return manager.path(step)


def _check_step(step: int, steps: list[int], where: str | Path) -> None:
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{where} has no checkpoint of step {step}; there are: {there}")
