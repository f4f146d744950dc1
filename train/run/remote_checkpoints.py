"""Checkpoints of a run at a URL: written into each node's folder, then uploaded; only what is uploaded counts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from matmix.train.checkpoint.files import read_manifest
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.process.agree import agree, complaint
from matmix.train.process.distributed import FolderGroup, gather_objects, rank_and_world_size
from matmix.train.run.lease import Lease
from matmix.train.run.sync import RunSync

logger = logging.getLogger(__name__)


class RemoteCheckpoints(CheckpointManager):
    """The checkpoints of a run at a URL. As its base, every method is called on all ranks."""

    def __init__(self, sync: RunSync, lease: Lease, *, up_to_date: bool, **options: Any) -> None:
        """lease: rank 0 holds it; up_to_date: whether this node took part in the last start of the run; options: of the
        base."""
        super().__init__(sync.folder / "checkpoints", **options)
        self.sync, self.lease, self.up_to_date = sync, lease, up_to_date
        self._uploaded: list[int] = []  # valid at the URL, as far as is known; the same on all ranks

    def steps(self) -> list[int]:
        return list(self._uploaded)

    def _looks_whole(self, step: int) -> bool:
        return step in self._uploaded

    def _folder(self) -> FolderGroup:
        return FolderGroup.of_node()

    @staticmethod
    def _is_first() -> bool:
        return rank_and_world_size()[0] == 0

    # -- saving ------------------------------------------------------------------------------------------

    def _publish(self, step: int, group: dist.ProcessGroup | None) -> None:
        """Uploads: the files of every node, the records, and then the manifest that makes it valid."""

        def begin() -> None:
            self.lease.check()
            self.sync.withdraw(step)

        def push() -> None:
            self.sync.push_files(step)
            self.sync.push_records()

        def finish() -> None:
            self.lease.check()
            self.sync.publish(step)

        if step in self._uploaded:
            self._uploaded.remove(step)
        agree(begin, here=self._is_first(), group=group)
        agree(push, here=self._folder().leads, group=group)
        agree(finish, here=self._is_first(), group=group)
        self._uploaded = sorted([*self._uploaded, step])
        kept = {step, *self._uploaded[-self.keep_last :]}
        self._uploaded = [s for s in self._uploaded if s in kept or self._stays_for_ever(s)]

    def _clear_failed(self, step: int) -> None:
        self._remove_all_but({step, *self.sync.local_steps()[-self.keep_last :]})

    def _prune(self, written: int) -> None:
        """Leaves the newest here, and at the URL what `_uploaded` says."""
        self._remove_all_but({written, *self._uploaded[-self.keep_last :]})
        if self._is_first():
            try:
                self.sync.remove_all_but({*self._uploaded, written})
            except OSError as error:
                logger.warning(f"old checkpoints of {self.sync.url} could not be removed: {error}")

    # -- loading -----------------------------------------------------------------------------------------

    def latest_valid(self, *, weights_only: bool = False) -> Path | None:
        """Fetches the newest valid checkpoint to every node and returns its path there; None if there is none at all.

        One that the last start wrote but could not upload is uploaded first. weights_only: fetches no files but those
        that must be read for the weights. Raises ValueError if none is valid, and RemoteError if the store cannot be
        read.
        """
        self.wait()
        steps = agree(self.sync.remote_steps, here=self._is_first())[0]
        unsent = self._find_unsent(max(steps, default=-1))
        if unsent is not None:
            try:
                self._publish(unsent, None)
            except OSError as error:
                problem = complaint(error)
                logger.warning(f"the checkpoint of step {unsent} still cannot be uploaded ({problem})")
            else:
                steps = sorted({*steps, unsent})
                logger.info(f"uploaded the checkpoint of step {unsent}, which the last start of this run could not")
        self._uploaded, first_problem = [], None
        for step in reversed(steps):
            problem = self._pull(step, weights_only)
            if problem is None:
                self._uploaded = [s for s in steps if s <= step]
                if not weights_only:
                    self._verified.add(self.path(step))
                return self.path(step)
            first_problem = first_problem or problem
            logger.warning(f"skipping a checkpoint: {problem}")
        if first_problem is not None:
            raise ValueError(
                f"{first_problem}; no checkpoint of {self.sync.url} is valid: restore one, or use another run_dir"
            )
        self._check_record(f"{self.sync.url}/checkpoints")
        return None

    def _pull(self, step: int, weights_only: bool) -> str | None:
        """What is wrong with a checkpoint at the URL, on any node; None: every node has it now."""
        problems = agree(lambda: self.sync.pull(step, weights_only=weights_only), here=self._folder().leads)
        return next(filter(None, problems), None)

    def _find_unsent(self, newest: int) -> int | None:
        """The newest step after `newest` of which the nodes together hold every file, undamaged."""
        leads = self._folder().leads
        held: dict[int, set[str]] = {}
        wanted: dict[int, set[str]] = {}
        if leads and self.up_to_date:
            for step in self.sync.local_steps():
                if step > newest:
                    try:
                        wanted[step] = set(read_manifest(self.path(step))["files"])
                        held[step] = self.sync.whole_files(step)
                    except (ValueError, OSError):
                        continue
        everywhere = gather_objects((leads, wanted, held))
        leaders = [(wants, has) for leads, wants, has in everywhere if leads]
        for step in sorted(set.intersection(*(set(wants) for wants, _ in leaders)), reverse=True):
            if all(set.union(*(has[step] for _, has in leaders)) >= wants[step] for wants, _ in leaders):
                return step
        return None
