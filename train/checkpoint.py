"""Checkpoints of a run: RUN/checkpoints/step-00001000/, written whole or not at all.

A checkpoint holds model and optimizer (as the engine writes them, every rank its part), the random generators
of every rank, and `checkpoint.json` with the loop's own state, the resolved config, and size and checksum of
every file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from matmix.train import rng
from matmix.train.checkpoint_files import (
    MANIFEST,
    check_shapes,
    check_sizes,
    describe_files,
    find_problem,
    list_files,
    read_manifest,
    sync_directory,
    together,
    write_manifest,
)
from matmix.train.distributed import from_rank_zero, gather_objects, rank_and_world_size
from matmix.train.engine.base import Engine

_NAME = re.compile(r"step-(\d{8,})")
# Directories under these names are unfinished or already given up: no reader looks at them.
LEFTOVERS = (".tmp-", ".old-", ".universal-")
_GENERATORS = "generators"

Tell = Callable[[str], None]


def _tell_on_rank_zero(text: str) -> None:
    if rank_and_world_size()[0] == 0:
        print(text, flush=True)


class CheckpointManager:
    """The checkpoints of one run. Every method is called on all ranks and returns the same on all."""

    def __init__(self, directory: str | Path, *, keep_last: int = 2, keep_every: int = 0) -> None:
        """keep_last: newest checkpoints that stay; keep_every: multiples of so many steps stay for ever."""
        self.directory = Path(directory)
        self.keep_last, self.keep_every = keep_last, keep_every
        self._damaged: set[Path] = set()
        self._verified: set[Path] = set()

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps for which there is a directory, valid or not, in order."""
        names = os.listdir(self.directory) if self.directory.is_dir() else []
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of `step` that looks whole."""
        return from_rank_zero(self._looks_whole(step))

    def _looks_whole(self, step: int) -> bool:
        try:
            check_sizes(self.path(step))
        except (ValueError, OSError):
            return False
        return self.path(step) not in self._damaged

    # -- saving ------------------------------------------------------------------------------------------

    def save(self, step: int, engine: Engine, extra: dict[str, Any], tell: Tell = _tell_on_rank_zero) -> Path | None:
        """Writes a checkpoint and removes those that need not be kept.

        extra: JSON values that `load` gives back. Returns the path, or None when the storage failed: then
        nothing has changed but for one line of warning through `tell`, and what was saved before is still
        there.
        """
        target, temporary = self.path(step), self.directory / f".tmp-{self.path(step).name}"
        complaint = self._write(step, engine, extra, temporary, target)
        is_first = rank_and_world_size()[0] == 0
        if complaint is None:
            self._damaged.discard(target)
            if is_first:
                self._prune(tell)
            return target
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        whole = [s for s in self.steps() if self._looks_whole(s)]
        last = f"the last valid one is {self.path(whole[-1]).name}" if whole else "there is none so far"
        tell(f"warning: no checkpoint at step {step}: {complaint}; training goes on, {last}")
        return None

    def _write(self, step: int, engine: Engine, extra: dict[str, Any], temporary: Path, target: Path) -> str | None:
        """The steps of a save, each of them on all ranks before the next; stops where one of them fails."""
        rank, world_size = rank_and_world_size()
        names: list[str] = []
        own: dict[str, list[int]] = {}

        def begin() -> None:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                (temporary / _GENERATORS).mkdir(parents=True)

        def write_generators() -> None:
            with (temporary / _GENERATORS / f"rank-{rank:05d}.json").open("w", encoding="utf-8") as file:
                json.dump(rng.get_state(), file)

        def list_all() -> None:
            names.extend(list_files(temporary) if rank == 0 else [])

        layout = engine.layout()
        for action in (begin, write_generators, lambda: engine.save(temporary), list_all):
            if complaint := together(action):
                return complaint
        share = from_rank_zero(names)[rank::world_size]
        if complaint := together(lambda: own.update(describe_files(temporary, share))):
            return complaint
        files = {name: entry for part in gather_objects(own) for name, entry in part.items()}

        def finish() -> None:
            if rank == 0:
                manifest = {"step": step, "layout": layout, "extra": extra, "files": files}
                write_manifest(temporary, manifest)
                self._put_in_place(temporary, target)

        return together(finish)

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        """Renames; a damaged checkpoint of the same step goes only when the new one stands."""
        aside = self.directory / f".old-{target.name}"
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        try:
            temporary.rename(target)
        except OSError:
            if aside.exists():
                aside.rename(target)
            raise
        sync_directory(self.directory)
        shutil.rmtree(aside, ignore_errors=True)

    def _prune(self, tell: Tell) -> None:
        whole = [step for step in self.steps() if self._looks_whole(step)]
        keep = set(whole[-self.keep_last :])
        try:
            for step in self.steps():
                if step not in keep and not (self.keep_every and step % self.keep_every == 0):
                    self._remove(self.path(step))
            for path in self.directory.iterdir():
                if path.name.startswith(LEFTOVERS):
                    shutil.rmtree(path)
        except OSError as error:
            tell(f"warning: old checkpoints in {self.directory} could not be removed: {error}")

    def _remove(self, path: Path) -> None:
        # The manifest goes first, so that a half-removed directory is never taken for a whole one.
        (path / MANIFEST).unlink(missing_ok=True)
        aside = self.directory / f".old-{path.name}"
        path.rename(aside)
        shutil.rmtree(aside)

    # -- loading -----------------------------------------------------------------------------------------

    def latest_valid(self, tell: Tell = _tell_on_rank_zero) -> Path | None:
        """The newest whole checkpoint, or None if there is none at all; damaged ones are named and skipped.

        Raises ValueError if there are checkpoints but none is whole: starting from scratch would bury them.
        """
        first_problem = None
        for step in reversed(from_rank_zero(self.steps())):
            path = self.path(step)
            problem = find_problem(path)
            if problem is None:
                self._verified.add(path)
                return path
            self._damaged.add(path)
            first_problem = first_problem or problem
            tell(f"warning: skipping a checkpoint: {problem}")
        if first_problem is not None:
            raise ValueError(
                f"{first_problem}; no checkpoint in {self.directory} is valid: restore one, or use another run_dir"
            )
        return None

    def load(self, path: str | Path, engine: Engine) -> dict[str, Any]:
        """Restores model, optimizer and random generators from a checkpoint; returns the `extra` of its save.

        Everything is checked before anything changes. Raises ValueError if the checkpoint is damaged, of
        another architecture, or of the other kind of engine.
        """
        path = Path(path)
        if path not in self._verified and (problem := find_problem(path)) is not None:
            raise ValueError(problem)
        manifest = read_manifest(path)
        layout = manifest["layout"]
        if layout["engine"] != engine.kind:
            names = {"torch": '"fsdp2" or "ddp"', "deepspeed": '"deepspeed"'}
            raise ValueError(
                f"checkpoint {path} was written with engine.name = {names[layout['engine']]} and cannot be "
                f"continued with {names[engine.kind]}: set engine.name accordingly"
            )
        check_shapes(path, layout["shapes"], engine.shapes())
        engine.load(path, layout)
        _restore_generators(path / _GENERATORS)
        return manifest["extra"]


def _restore_generators(directory: Path) -> None:
    rank, _ = rank_and_world_size()
    own = directory / f"rank-{rank:05d}.json"
    if own.is_file():
        rng.set_state(json.loads(own.read_text(encoding="utf-8")))
    else:
        # A rank that the saved run did not have: a stream of its own, fixed by the checkpoint.
        rng.set_state(json.loads((directory / "rank-00000.json").read_text(encoding="utf-8")))
        rng.seed_all(int(torch.randint(2**62, ()).item()), rank)


def read_portable(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and full CPU tensor of the weights (and persistent buffers) in a checkpoint, one at a time.

    Needs neither ranks nor a model, and holds one tensor in memory. Raises ValueError if the checkpoint is
    damaged.
    """
    path = Path(path)
    if (problem := find_problem(path)) is not None:
        raise ValueError(problem)
    layout = read_manifest(path)["layout"]
    if layout["engine"] == "deepspeed":
        from matmix.train.engine.zero_files import iterate_zero

        yield from iterate_zero(path, layout)
    else:
        from matmix.train.engine.fsdp import SUBDIRECTORY
        from matmix.train.engine.sharded_files import iterate_sharded

        yield from iterate_sharded(path / SUBDIRECTORY, "model.")
