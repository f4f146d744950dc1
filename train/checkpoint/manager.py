"""Checkpoints of a run: RUN/checkpoints/step-00001000/, written whole or not at all. Each holds model and optimizer
(every rank its part), every rank's random generators, and `checkpoint.json` with all else."""

import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from matmix.data.artifacts import read_json, shell_line
from matmix.data.storage.files import write_atomic
from matmix.train.checkpoint import save
from matmix.train.checkpoint.files import check_shapes, find_problem
from matmix.train.checkpoint.lanes import Lanes
from matmix.train.checkpoint.local_copies import START, LocalCopies
from matmix.train.checkpoint.manifest import GENERATORS, check_sizes, read_manifest
from matmix.train.checkpoint.save import BackgroundSave, RankState
from matmix.train.checkpoint.steps import LEFTOVERS, list_steps, remove_checkpoint, step_name, step_of
from matmix.train.engine.base import Engine
from matmix.train.engine.full_tensors import KIND as FULL_TENSORS
from matmix.train.engine.kinds import files_of, open_full
from matmix.train.failures import is_out_of_memory
from matmix.train.process import distributed
from matmix.train.process.distributed import FolderGroup, agree, complaint, from_rank_zero, gather_objects

logger = logging.getLogger(__name__)

Keep = Callable[[Iterable[int]], set[int]]
"""Returns which of these steps, valid ones in order, stay."""
Complete = Callable[[RankState, dist.ProcessGroup | None], bool]
"""Does the rest of a save, in the background; returns whether there is a checkpoint now."""


class Store:
    """The place where the checkpoints of a run are written, and where they count: a folder that all ranks see."""

    def __init__(self, directory: Path, where: str = "", folder: FolderGroup | None = None) -> None:
        """where: what the user calls the place; folder: the ranks that share `directory`, by default all."""
        self.directory, self.where = directory, where or str(directory)
        self.folder = folder or FolderGroup.of_all()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, valid or not, in order."""
        return list_steps(self.directory)

    def looks_whole(self, step: int) -> bool:
        """Returns whether the checkpoint of a step is there; its content is not read."""
        try:
            check_sizes(self.directory / step_name(step))
        except (ValueError, OSError):
            return False
        return True

    def steps_to_try(self) -> list[int]:
        """Returns the steps of which there may be a valid checkpoint, in order, the same on all ranks."""
        return from_rank_zero(self.steps())

    def find_problem(self, step: int, *, weights_only: bool) -> str | None:
        """Says on all ranks what is wrong with the checkpoint of a step; None: it is whole, and in `directory`."""
        return find_problem(self.directory / step_name(step), weights_only=weights_only)

    def publish(self, step: int, group: dist.ProcessGroup | None) -> None:
        """Brings a written checkpoint to where it counts. Raises OSError on all ranks if the storage there failed."""

    def clear_failed(self, step: int) -> None:
        """Removes from `directory`, on a rank that leads it, what else may go after a save that failed."""

    def remove_all_but(self, written: int, keep: Keep) -> None:
        """Removes, on all ranks, the checkpoints that need not stay beside that of `written`, which is valid."""
        if self.folder.leads:
            self.remove_here({written, *keep(filter(self.looks_whole, self.steps()))})

    def remove_here(self, keep: set[int]) -> None:
        """Removes from `directory` what is unfinished and other checkpoints; a warning says where the storage fails."""
        try:
            for path in list(self.directory.iterdir()):
                if path.name.startswith(LEFTOVERS):
                    shutil.rmtree(path)
                elif (step := step_of(path.name)) is not None and step not in keep:
                    remove_checkpoint(path)
        except OSError as error:
            logger.warning(f"old checkpoints in {self.where} could not be removed: {error}")


class CheckpointManager:
    """The checkpoints of one run. Every method is called on all ranks and returns the same on all."""

    def __init__(
        self,
        directory: str | Path | Store,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        record: Path | None = None,
        start_over: bool = False,
        copies: LocalCopies | None = None,
    ) -> None:
        """keep_last: newest checkpoints that stay; keep_every: multiples of so many steps stay for ever; record: a file
        outside of the folder that says that there were checkpoints, should they vanish; start_over: they may have;
        copies: those of the same run that lie with the nodes."""
        self.store = directory if isinstance(directory, Store) else Store(Path(directory))
        self.keep_last, self.keep_every = keep_last, keep_every
        self.record, self.start_over, self.copies = record, start_over, copies
        self.best = -1
        """The step of a checkpoint that is kept besides the newest; -1 = none."""
        self.lanes: Lanes | None = None
        """What rows carry, which belongs to a checkpoint as well."""
        self._damaged: set[int] = set()  # steps
        self._verified: set[Path] = set()
        self._running: BackgroundSave | None = None
        self._group: dist.ProcessGroup | None = None  # of the thread that saves
        self._said_slow = False

    def path(self, step: int) -> Path:
        return self.store.directory / step_name(step)

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, valid or not, in order."""
        return self.store.steps()

    def has(self, step: int) -> bool:
        """Returns whether there is a checkpoint of `step` that looks whole."""
        return from_rank_zero(self._looks_whole(step))

    def _looks_whole(self, step: int) -> bool:
        return step not in self._damaged and self.store.looks_whole(step)

    # -- saving ------------------------------------------------------------------------------------------

    def save(self, step: int, engine: Engine, extra: dict[str, Any]) -> Path | None:
        """Writes a checkpoint and removes those that need not be kept. Waits first for a save that is running. extra:
        JSON values that `load` gives back. Returns the path, or None, with a warning, when the storage failed."""
        self.wait()
        state = RankState.collect(step, engine, extra, copy=False, lanes=self.lanes)
        return self.path(step) if self._complete(state, None) else None

    def begin_save(self, step: int, engine: Engine, extra: dict[str, Any]) -> None:
        """Copies to host memory what `save` would write, and leaves the rest to a thread: `wait` says how it went.
        Waits first for a save that is running; where a rank has no memory for its copy, saves as `save` does."""
        running = self._running
        if running is not None and not running.saved.done() and not running.local and not self._said_slow:
            self._said_slow = True
            slow = f"the checkpoint of step {running.step} is still being written, and training waits for it"
            logger.warning(f"at step {step} {slow}: raise checkpoint.every, or use faster storage (said once)")
        self.wait()
        if (state := self._copied(step, engine, extra)) is not None:
            self._begin(state, engine, self._complete)
            return
        waits = f"training waits while step {step} is saved; checkpoint.asynchronous = false spares the try"
        logger.warning(f"there is no host memory for a copy of the state: {waits}")
        self.save(step, engine, extra)

    def begin_copy(self, step: int, engine: Engine, extra: dict[str, Any]) -> None:
        """Begins a copy that lies with the nodes and is no checkpoint, as `begin_save` does; none where a save is still
        running on any rank. A line of warning says what keeps copies from being made."""
        copies = self.copies
        if copies is None or copies.off:
            return
        if any(gather_objects(self._running is not None and not self._running.saved.done())):
            return
        self.wait()
        if copies.off:
            return
        state = self._copied(step, engine, {**extra, START: copies.start})
        if state is None:
            copies.give_up("there is no host memory for a copy of the state")
        elif copies.has_room(engine.host.size):
            self._begin(state, engine, copies.complete, local=True)

    def _begin(self, state: RankState, engine: Engine, complete: Complete, *, local: bool = False) -> None:
        self._group = self._group or distributed.make_side_group()
        work = functools.partial(complete, state, self._group)
        self._running = BackgroundSave.begin(state.step, work, engine.device, local=local)

    def _copied(self, step: int, engine: Engine, extra: dict[str, Any]) -> RankState | None:
        """Returns what there is to save, in host memory; None on every rank where that does not suffice on one."""
        state = None
        try:
            state = RankState.collect(step, engine, extra, copy=True, lanes=self.lanes)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        if all(gather_objects(state is not None)):
            return state
        engine.host.clear()
        return None

    def wait(self) -> int | None:
        """Waits for a save in the background; returns its step if the storage failed. Raises other errors."""
        running, self._running = self._running, None
        if running is None or running.saved.result():
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
        """Writes, then clears up; in the background, too. Returns whether there is a checkpoint now."""
        step, target, leads = state.step, self.path(state.step), self.store.folder.leads
        temporary = target.with_name(f".tmp-{target.name}")
        try:
            save.write_checkpoint(state, temporary, target, group, self.store.folder)
            self.store.publish(step, group)
        except OSError as error:
            if leads:
                shutil.rmtree(temporary, ignore_errors=True)
                self.store.clear_failed(step)
            whole = [s for s in self.steps() if self._looks_whole(s)]
            last = f"the last valid one is {self.path(whole[-1]).name}" if whole else "there is none so far"
            logger.warning(f"no checkpoint at step {step}: {complaint(error)}; training goes on, {last}")
            return False
        self._damaged.discard(step)
        if leads and self.record is not None:
            try:
                write_atomic(self.record, json.dumps({"step": step}) + "\n")
            except OSError as error:
                logger.warning(f"{self.record} could not be written: {error}")
        self.clear_up(step)
        return True

    def clear_up(self, step: int) -> None:
        """Removes what need not be kept besides the checkpoint of `step`: who saved it may have been killed before."""

        def keep(steps: Iterable[int]) -> set[int]:
            valid = [one for one in steps if one not in self._damaged]
            for_ever = [one for one in self.steps() if self.keep_every and one % self.keep_every == 0]
            return {self.best, *valid[-self.keep_last :], *for_ever}

        self.store.remove_all_but(step, keep)

    # -- loading -----------------------------------------------------------------------------------------

    def newest(self, engine: Engine) -> Path | None:
        """Returns what to go on from after a start: `latest_valid`, or a copy of a later step, which each node then has
        as far as its ranks need it to load it into `engine`."""
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
        """Returns the newest whole checkpoint, None if there is none at all; damaged ones are named and skipped.
        weights_only: looks at the files alone that are read for the weights. Raises ValueError if none is whole, or if
        there were some: starting from scratch would bury the run."""
        self.wait()
        first_problem = None
        for step in reversed(self.store.steps_to_try()):
            problem = self.store.find_problem(step, weights_only=weights_only)
            if problem is None:
                if not weights_only:
                    self._verified.add(self.path(step))
                return self.path(step)
            self._damaged.add(step)
            first_problem = first_problem or problem
            logger.warning(f"skipping a checkpoint: {problem}")
        where = self.store.where
        if first_problem is not None:
            raise ValueError(f"{first_problem}; no checkpoint in {where} is valid: restore one, or use another run_dir")
        recorded = from_rank_zero(None if self.record is None else _recorded_step(self.record))
        if recorded is not None and not self.start_over:
            problem = f"this run has saved a checkpoint of step {recorded}, but {where} holds none"
            again = "begin again at step 0 with --checkpoint.start-over True (records are moved aside)"
            raise ValueError(f"{problem}: put them back, use another run_dir, or {again}")
        return None

    def load(self, path: str | Path, engine: Engine) -> dict[str, Any]:
        """Restores model, optimizer and random generators from a checkpoint; returns the `extra` of its save.
        Everything is checked before anything changes. Raises ValueError if the checkpoint is damaged, of another
        architecture, or of another kind of engine and not converted."""
        path = Path(path)
        self.wait()
        if path not in self._verified and (problem := find_problem(path)) is not None:
            raise ValueError(problem)
        manifest = read_manifest(path)
        layout, rank = manifest["layout"], engine.mesh.batch_rank
        if layout["engine"] not in (engine.kind, FULL_TENSORS):
            run = path.parent.parent
            there, here = files_of(layout["engine"]).engine_names, files_of(engine.kind).engine_names
            convert = shell_line("matmix", "checkpoints", "convert", run, "--out", f"{run}-converted")
            problem = f"was written with engine.name = {there} and cannot be continued with {here} as it is"
            advice = f"set engine.name accordingly, or go on from the run that `{convert}` makes"
            raise ValueError(f"checkpoint {path} {problem}: {advice}")
        check_shapes(path, layout["shapes"], engine.shapes())
        generators = save.read_generators(path / GENERATORS, rank)
        agree(lambda: engine.load(open_full(path, layout)))
        save.restore_generators(generators, rank)
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
