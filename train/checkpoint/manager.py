"""Checkpoints of a run: RUN/checkpoints/step-00001000/, written whole or not at all.

A checkpoint holds model and optimizer (as the engine writes them, every rank its part), the random generators
of every rank, and `checkpoint.json` with the loop's own state, the resolved config, and size and checksum of
every file.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from matmix.data.artifacts import read_json, shell_line
from matmix.data.storage.files import write_atomic
from matmix.train.checkpoint.files import GENERATORS, check_shapes, check_sizes, find_problem, read_manifest
from matmix.train.checkpoint.generators import read_generators, restore_generators
from matmix.train.checkpoint.local_copies import LocalCopies
from matmix.train.checkpoint.save import BackgroundSave, RankState, write_checkpoint
from matmix.train.checkpoint.steps import MANIFEST, list_steps, step_name, step_of
from matmix.train.engine.base import Engine
from matmix.train.engine.full_tensors import KIND as FULL_TENSORS
from matmix.train.engine.kinds import files_of, open_full
from matmix.train.failures import is_out_of_memory
from matmix.train.process.distributed import (
    FolderGroup,
    complaint,
    from_rank_zero,
    gather_objects,
    make_side_group,
)

logger = logging.getLogger(__name__)

# Directories under these names are unfinished or already given up: no reader looks at them.
LEFTOVERS = (".tmp-", ".old-")


class CheckpointManager:
    """The checkpoints of one run. Every method is called on all ranks and returns the same on all."""

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        record: Path | None = None,
        start_over: bool = False,
        copies: LocalCopies | None = None,
    ) -> None:
        """keep_last: newest checkpoints that stay; keep_every: multiples of so many steps stay for ever; record: a file
        outside of `directory` that says that there were checkpoints, should they vanish; start_over: they may have;
        copies: those of the same run that lie with the nodes."""
        self.directory = self._named = Path(directory)
        self.keep_last, self.keep_every = keep_last, keep_every
        self.record, self.start_over, self.copies = record, start_over, copies
        self.best = -1
        """The step of a checkpoint that is kept besides the newest; -1 = none."""
        self._damaged: set[int] = set()  # steps
        self._verified: set[Path] = set()
        self._running: BackgroundSave | None = None
        self._group: dist.ProcessGroup | None = None  # of the thread that saves
        self._said_slow = False

    @property
    def where(self) -> str:
        """What the user calls the place of these checkpoints."""
        return str(self._named)

    def path(self, step: int) -> Path:
        return self.directory / step_name(step)

    def steps(self) -> list[int]:
        """Steps for which there is a directory, valid or not, in order."""
        return list_steps(self.directory)

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of `step` that looks whole."""
        return from_rank_zero(self._looks_whole(step))

    def _looks_whole(self, step: int) -> bool:
        try:
            check_sizes(self.path(step))
        except (ValueError, OSError):
            return False
        return step not in self._damaged

    # -- saving ------------------------------------------------------------------------------------------

    def save(self, step: int, engine: Engine, extra: dict[str, Any]) -> Path | None:
        """Writes a checkpoint and removes those that need not be kept.

        extra: JSON values that `load` gives back. Returns the path, or None when the storage failed: then
        nothing has changed but for one line of warning, and what was saved before is still
        there. Waits first for a save that is running.
        """
        self.wait()
        state = RankState.collect(step, engine, extra, copy=False)
        return self.path(step) if self._complete(state, None) else None

    def begin_save(self, step: int, engine: Engine, extra: dict[str, Any]) -> None:
        """Copies to host memory what `save` would write, and leaves the rest to a thread: `wait` says how it went.

        There is never more than one: waits first for a save that is running. Where a rank has no memory for its copy,
        saves as `save` does.
        """
        running = self._running
        if running is not None and running.is_running() and not running.local and not self._said_slow:
            self._said_slow = True
            logger.warning(
                f"at step {step} the checkpoint of step {running.step} is still being written, and "
                f"training waits for it: raise checkpoint.every, or use faster storage (said once)"
            )
        self.wait()
        state = self._copied(step, engine, extra)
        if state is None:
            logger.warning(
                f"there is no host memory for a copy of the state: training waits while step {step} is saved; "
                f"checkpoint.asynchronous = false spares the try"
            )
            self.save(step, engine, extra)
            return
        self._running = BackgroundSave(step, functools.partial(self._complete, state, self._side()), engine.device)

    def begin_copy(self, step: int, engine: Engine, extra: dict[str, Any]) -> None:
        """As `begin_save`, for a copy that lies with the nodes and is no checkpoint; none is made where a save is still
        running on any rank. A line of warning says what keeps copies from being made."""
        copies = self.copies
        if copies is None or copies.off:
            return
        if any(gather_objects(self._running is not None and self._running.is_running())):
            return
        self.wait()
        if copies.off:
            return
        state = self._copied(step, engine, copies.labelled(extra))
        if state is None:
            copies.give_up("there is no host memory for a copy of the state")
        elif copies.has_room(engine.host.size):
            work = functools.partial(copies.complete, state, self._side())
            self._running = BackgroundSave(step, work, engine.device, local=True)

    def begin_anew(self) -> None:
        """For a run that begins at step 0: no copy that lies with the nodes is of it."""
        if self.copies is not None:
            self.copies.follow(None)

    def end_copies(self) -> None:
        """Removes the copies that lie with the nodes: all that was done is saved."""
        if self.copies is not None:
            self.copies.end()

    def _side(self) -> dist.ProcessGroup | None:
        if self._group is None:
            self._group = make_side_group()
        return self._group

    @staticmethod
    def _copied(step: int, engine: Engine, extra: dict[str, Any]) -> RankState | None:
        """What there is to save, in host memory; None on every rank where that does not suffice on one."""
        state = None
        try:
            state = RankState.collect(step, engine, extra, copy=True)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        if all(gather_objects(state is not None)):
            return state
        engine.host.clear()
        return None

    def wait(self) -> int | None:
        """Waits for a save in the background; its step if it failed, None if it did not or there was none.

        Raises what is no failure of the storage, but a mistake of ours or the end of another rank.
        """
        running, self._running = self._running, None
        if running is None or running.join():
            return None
        if running.local:
            self.copies.off = True
            return None
        return running.step

    def close(self) -> None:
        """Waits for a save in the background and raises nothing: for the end of a run, also after an error."""
        running = self._running
        try:
            self.wait()
        except Exception as error:
            what = "node-local copy" if running.local else "checkpoint"
            logger.warning(f"no {what} at step {running.step}: {error}")

    def _complete(self, state: RankState, group: dist.ProcessGroup | None) -> bool:
        """Writes, then clears up; in the background, too. Whether there is a checkpoint now."""
        step, target = state.step, self.path(state.step)
        temporary = self.directory / f".tmp-{target.name}"
        folder = self._folder()
        try:
            write_checkpoint(state, temporary, target, group, folder)
            self._publish(step, group)
        except OSError as error:
            if folder.leads:
                shutil.rmtree(temporary, ignore_errors=True)
                self._clear_failed(step)
            whole = [s for s in self.steps() if self._looks_whole(s)]
            last = f"the last valid one is {self.path(whole[-1]).name}" if whole else "there is none so far"
            logger.warning(f"no checkpoint at step {step}: {complaint(error)}; training goes on, {last}")
            return False
        self._damaged.discard(step)
        if folder.leads:
            self._note(step)
            self._prune(step)
        return True

    def clear_up(self, step: int) -> None:
        """Removes what need not be kept besides the checkpoint of `step`: who saved it may have been killed before."""
        if self._folder().leads:
            self._prune(step)

    def _folder(self) -> FolderGroup:
        """Which ranks share `directory`."""
        return FolderGroup.of_all()

    def _publish(self, step: int, group: dist.ProcessGroup | None) -> None:
        """Brings a written checkpoint to where it counts. Raises OSError on all ranks if the storage there failed."""

    def _clear_failed(self, step: int) -> None:
        """Removes from `directory`, on the rank that leads it, what a failed save left besides its unfinished files."""

    def _note(self, step: int) -> None:
        if self.record is not None:
            try:
                write_atomic(self.record, json.dumps({"step": step}) + "\n")
            except OSError as error:
                logger.warning(f"{self.record} could not be written: {error}")

    def _prune(self, written: int) -> None:
        whole = [step for step in self.steps() if self._looks_whole(step)]
        # The one just written is known to be valid; others only look like it.
        keep = {written, self.best, *whole[-self.keep_last :], *filter(self._stays_for_ever, self.steps())}
        self._remove_all_but(keep)

    def _stays_for_ever(self, step: int) -> bool:
        return bool(self.keep_every) and step % self.keep_every == 0

    def _remove_all_but(self, keep: set[int]) -> None:
        """Removes the other checkpoints, and what is unfinished. Where the storage fails, a warning says so."""
        try:
            for path in list(self.directory.iterdir()):
                if path.name.startswith(LEFTOVERS):
                    shutil.rmtree(path)
                elif (step := step_of(path.name)) is not None and step not in keep:
                    self._remove(path)
        except OSError as error:
            logger.warning(f"old checkpoints in {self.where} could not be removed: {error}")

    def _remove(self, path: Path) -> None:
        # The manifest goes first, so that a half-removed directory is never taken for a whole one.
        (path / MANIFEST).unlink(missing_ok=True)
        aside = self.directory / f".old-{path.name}"
        path.rename(aside)
        shutil.rmtree(aside)

    # -- loading -----------------------------------------------------------------------------------------

    def newest(self, engine: Engine) -> Path | None:
        """What to go on from after a start: `latest_valid`, or a copy that the nodes hold of a later step; each node
        then has what its ranks need of it to load it into `engine`."""
        saved = self.latest_valid()
        step = -1 if saved is None else step_of(saved.name)
        copy = None if self.copies is None else self.copies.newest(step, engine)
        if copy is None:
            return saved
        self._verified.add(copy)
        there = "there is no checkpoint yet" if saved is None else f"the newest checkpoint is {saved.name}"
        logger.info(f"going on from the node-local copy of step {step_of(copy.name)}: {there}")
        return copy

    def latest_valid(self, *, weights_only: bool = False) -> Path | None:
        """The newest whole checkpoint, or None if there is none at all; damaged ones are named and skipped.

        weights_only: looks at no files but those that must be read for the weights. Raises ValueError if there are
        checkpoints but none is whole, or if there were some: starting from scratch would bury the run.
        """
        self.wait()
        first_problem = None
        for step in reversed(self._steps_to_try()):
            path = self.path(step)
            problem = self._find_problem(step, weights_only)
            if problem is None:
                if not weights_only:
                    self._verified.add(path)
                return path
            self._damaged.add(step)
            first_problem = first_problem or problem
            logger.warning(f"skipping a checkpoint: {problem}")
        if first_problem is not None:
            raise ValueError(
                f"{first_problem}; no checkpoint in {self.where} is valid: restore one, or use another run_dir"
            )
        self._check_record()
        return None

    def _steps_to_try(self) -> list[int]:
        """Steps of which there may be a valid checkpoint, in order; the same on all ranks."""
        return from_rank_zero(self.steps())

    def _find_problem(self, step: int, weights_only: bool) -> str | None:
        """What is wrong with the checkpoint of a step; None: it is whole, and in `directory`."""
        return find_problem(self.path(step), weights_only=weights_only)

    def _check_record(self) -> None:
        """Raises ValueError where there is no checkpoint although there was one."""
        step = from_rank_zero(None if self.record is None else _recorded_step(self.record))
        if step is not None and not self.start_over:
            raise ValueError(
                f"this run has saved a checkpoint of step {step}, but {self.where} holds none: put them back, use "
                f"another run_dir, or begin again at step 0 with --checkpoint.start-over True (records are moved aside)"
            )

    def load(self, path: str | Path, engine: Engine) -> dict[str, Any]:
        """Restores model, optimizer and random generators from a checkpoint; returns the `extra` of its save.

        Everything is checked before anything changes. Raises ValueError if the checkpoint is damaged, of
        another architecture, or of another kind of engine and not converted.
        """
        path = Path(path)
        self.wait()
        if path not in self._verified and (problem := find_problem(path)) is not None:
            raise ValueError(problem)
        manifest = read_manifest(path)
        layout = manifest["layout"]
        kind = layout["engine"]
        if kind not in (engine.kind, FULL_TENSORS):
            run, there, here = path.parent.parent, files_of(kind), files_of(engine.kind)
            raise ValueError(
                f"checkpoint {path} was written with engine.name = {there.engine_names} and cannot be continued with "
                f"{here.engine_names} as it is: set engine.name accordingly, or go on from the run that "
                f"`{shell_line('matmix', 'checkpoints', 'convert', run, '--out', f'{run}-converted')}` makes"
            )
        check_shapes(path, layout["shapes"], engine.shapes())
        generators = read_generators(path / GENERATORS)
        if kind == FULL_TENSORS:
            engine.load_full(open_full(path, layout))
        else:
            engine.load(path, layout)
        restore_generators(generators)
        if self.copies is not None:
            self.copies.follow(path)
        return manifest["extra"]


def _recorded_step(record: Path) -> int | None:
    try:
        return read_json(record)["step"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return -1  # damaged, but there
