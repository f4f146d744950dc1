"""Checkpoints of a run at a URL: written into each node's folder, then uploaded; only what is uploaded counts."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch.distributed as dist

from matmix.train.checkpoint.files import matches, read_manifest
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.steps import list_steps
from matmix.train.process.distributed import FolderGroup, agree, complaint, gather_objects, rank_and_world_size
from matmix.train.run.sync import CHECKPOINTS, RunSync

logger = logging.getLogger(__name__)


class RemoteCheckpoints(CheckpointManager):
    """The checkpoints of a run at a URL. As its base, every method is called on all ranks."""

    def __init__(self, sync: RunSync, *, up_to_date: bool, **options: Any) -> None:
        """sync: rank 0 holds its lease; up_to_date: whether this node took part in the last start of the run; options:
        of the base."""
        super().__init__(sync.folder / CHECKPOINTS, **options)
        self.sync, self.up_to_date = sync, up_to_date
        self._is_first = rank_and_world_size()[0] == 0
        self._uploaded: list[int] = []  # valid at the URL, as far as is known; the same on all ranks

    @property
    def where(self) -> str:
        return f"{self.sync.url}/checkpoints"

    def steps(self) -> list[int]:
        return list(self._uploaded)

    def _looks_whole(self, step: int) -> bool:
        return step in self._uploaded

    def _folder(self) -> FolderGroup:
        return FolderGroup.of_node()

    # -- saving ------------------------------------------------------------------------------------------

    def _publish(self, step: int, group: dist.ProcessGroup | None) -> None:
        """Uploads: the files of every node, the records, and then the manifest that makes it valid."""
        self._uploaded = [uploaded for uploaded in self._uploaded if uploaded != step]
        agree(lambda: self.sync.withdraw(step), here=self._is_first, group=group)
        agree(lambda: self.sync.push(step), here=self._folder().leads, group=group)
        agree(lambda: self.sync.publish(step), here=self._is_first, group=group)
        self._uploaded = sorted([*self._uploaded, step])
        kept = {step, self.best, *self._uploaded[-self.keep_last :]}
        self._uploaded = [s for s in self._uploaded if s in kept or self._stays_for_ever(s)]

    def _clear_failed(self, step: int) -> None:
        self._remove_all_but({step, *list_steps(self.directory, written=True)[-self.keep_last :]})

    def _prune(self, written: int) -> None:
        """Leaves the newest here, and at the URL what `_uploaded` says."""
        self._remove_all_but({written, *self._uploaded[-self.keep_last :]})
        if self._is_first:
            try:
                self.sync.remove_all_but({*self._uploaded, written})
            except OSError as error:
                logger.warning(f"old checkpoints of {self.sync.url} could not be removed: {error}")

    # -- loading -----------------------------------------------------------------------------------------

    def _steps_to_try(self) -> list[int]:
        """Those at the URL. A checkpoint that the last start wrote but could not upload is uploaded first."""
        steps = agree(self.sync.remote_steps, here=self._is_first)[0]
        if (unsent := self._find_unsent(max(steps, default=-1))) is not None:
            try:
                self._publish(unsent, None)
            except OSError as error:
                logger.warning(f"the checkpoint of step {unsent} still cannot be uploaded ({complaint(error)})")
            else:
                steps = sorted({*steps, unsent})
                logger.info(f"uploaded the checkpoint of step {unsent}, which the last start of this run could not")
        self._uploaded = list(steps)
        return steps

    def _find_problem(self, step: int, weights_only: bool) -> str | None:
        """Fetches the checkpoint to every node; what is wrong with it on any of them."""
        problems = agree(lambda: self.sync.pull(step, weights_only=weights_only), here=self._folder().leads)
        if problem := next(filter(None, problems), None):
            self._uploaded.remove(step)
        return problem

    def _find_unsent(self, newest: int) -> int | None:
        """The newest step after `newest` of which the nodes together hold every file, undamaged."""
        here: dict[int, tuple[set[str], set[str]]] = {}
        if self._folder().leads and self.up_to_date:
            for step in filter(lambda step: step > newest, list_steps(self.directory, written=True)):
                with contextlib.suppress(ValueError, OSError):
                    files = read_manifest(path := self.path(step))["files"]
                    here[step] = set(files), {name for name, entry in files.items() if matches(path / name, entry)}
        nodes = [found for found in gather_objects(here if self._folder().leads else None) if found is not None]
        for step in sorted(set.intersection(*map(set, nodes)), reverse=True):
            held = set.union(*(found[step][1] for found in nodes))
            if all(held >= found[step][0] for found in nodes):
                return step
        return None
