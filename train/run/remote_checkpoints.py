"""Checkpoints of a run at a URL: written into each node's folder, then uploaded; only what is uploaded counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from matmix.train.checkpoint.files import read_manifest, together
from matmix.train.checkpoint.manager import LEFTOVERS, CheckpointManager, tell_on_rank_zero
from matmix.train.checkpoint.save import Tell
from matmix.train.process.distributed import from_rank_zero, gather_objects, rank_and_world_size
from matmix.train.process.places import Place
from matmix.train.run.lease import Lease
from matmix.train.run.mirror import Mirror


class MirroredCheckpoints(CheckpointManager):
    """The checkpoints of a run at a URL. As its base, every method is called on all ranks."""

    def __init__(
        self,
        mirror: Mirror,
        lease: Lease,
        *,
        up_to_date: bool,
        **options: Any,
    ) -> None:
        """lease: rank 0 holds it; up_to_date: whether this node took part in the last start of the run; options: of the
        base."""
        super().__init__(mirror.folder / "checkpoints", **options)
        self.mirror, self.lease, self.up_to_date = mirror, lease, up_to_date
        self._uploaded: list[int] = []  # valid at the URL, as far as is known; the same on all ranks

    def steps(self) -> list[int]:
        return list(self._uploaded)

    def _looks_whole(self, step: int) -> bool:
        return step in self._uploaded

    def _place(self) -> Place:
        return Place.of_node()

    # -- saving ------------------------------------------------------------------------------------------

    def _publish(self, step: int, group: dist.ProcessGroup | None) -> str | None:
        """Uploads: the files of every node, the records, and then the manifest that makes it valid."""
        first, leads = rank_and_world_size()[0] == 0, self._place().leads

        def begin() -> None:
            if first:
                self.lease.check()
                self.mirror.withdraw(step)

        def push() -> None:
            if leads:
                self.mirror.push_files(step)
                self.mirror.push_records()

        def finish() -> None:
            if first:
                self.lease.check()
                self.mirror.publish(step)

        if step in self._uploaded:
            self._uploaded.remove(step)
        for action in (begin, push, finish):
            if complaint := together(action, group):
                if leads:
                    self._trim({step, *self.mirror.local_steps()[-self.keep_last :]})
                return complaint
        self._uploaded = sorted([*self._uploaded, step])
        kept = {step, *self._uploaded[-self.keep_last :]}
        self._uploaded = [s for s in self._uploaded if s in kept or self._is_for_ever(s)]
        return None

    def _is_for_ever(self, step: int) -> bool:
        return bool(self.keep_every) and step % self.keep_every == 0

    def _prune(self, written: int, tell: Tell) -> None:
        """Leaves the newest here, and at the URL what `_uploaded` says."""
        try:
            self._trim({written, *self._uploaded[-self.keep_last :]})
            if rank_and_world_size()[0] == 0:
                self.mirror.remove_all_but({*self._uploaded, written})
        except OSError as error:
            tell(f"warning: old checkpoints of {self.mirror.url} could not be removed: {error}")

    def _trim(self, keep: set[int]) -> None:
        """Removes the other checkpoints from this node's folder."""
        names = {self.path(step).name for step in keep}
        for path in self.directory.iterdir():
            if path.name.startswith(LEFTOVERS):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in names:
                self._remove(path)

    # -- loading -----------------------------------------------------------------------------------------

    def latest_valid(self, tell: Tell = tell_on_rank_zero) -> Path | None:
        """Fetches the newest valid checkpoint to every node and returns its path there; None if there is none at all.

        One that the last start wrote but could not upload is uploaded first. Raises ValueError if none is valid, and
        RemoteError if the store cannot be read.
        """
        self.wait(tell)
        steps = self._on_first(self.mirror.remote_steps)
        unsent = self._find_unsent(max(steps, default=-1))
        if unsent is not None:
            complaint = self._publish(unsent, None)
            if complaint is None:
                steps = sorted({*steps, unsent})
                tell(f"uploaded the checkpoint of step {unsent}, which the last start of this run could not")
            else:
                tell(f"warning: the checkpoint of step {unsent} still cannot be uploaded ({complaint})")
        self._uploaded, first_problem = [], None
        for step in reversed(steps):
            problem = self._pull(step, tell)
            if problem is None:
                self._uploaded = [s for s in steps if s <= step]
                self._verified.add(self.path(step))
                return self.path(step)
            first_problem = first_problem or problem
            tell(f"warning: skipping a checkpoint: {problem}")
        if first_problem is not None:
            raise ValueError(
                f"{first_problem}; no checkpoint of {self.mirror.url} is valid: restore one, or use another run_dir"
            )
        self._check_record(f"{self.mirror.url}/checkpoints")
        return None

    def _find_unsent(self, newest: int) -> int | None:
        """The newest step after `newest` of which the nodes together hold every file, undamaged."""
        place = self._place()
        held: dict[int, set[str]] = {}
        wanted: dict[int, set[str]] = {}
        if place.leads and self.up_to_date:
            for step in self.mirror.local_steps():
                if step > newest:
                    try:
                        wanted[step] = set(read_manifest(self.path(step))["files"])
                        held[step] = self.mirror.whole_files(step)
                    except (ValueError, OSError):
                        continue
        everywhere = gather_objects((place.leads, wanted, held))
        leaders = [(wants, has) for leads, wants, has in everywhere if leads]
        for step in sorted(set.intersection(*(set(wants) for wants, _ in leaders)), reverse=True):
            if all(set.union(*(has[step] for _, has in leaders)) >= wants[step] for wants, _ in leaders):
                return step
        return None

    def _pull(self, step: int, tell: Tell) -> str | None:
        """What is wrong with a checkpoint at the URL, on any node; None: every node has it now."""
        place, problems = self._place(), []

        def pull() -> None:
            if place.leads:
                problems.append(self.mirror.pull(step, tell if self.mirror.first else lambda text: None))

        if complaint := together(pull):
            raise OSError(complaint)
        return next((problem for part in gather_objects(problems) for problem in part if problem), None)

    def _on_first(self, action: Callable[[], Any]) -> Any:
        """`action` of rank 0, its result on all ranks. Raises OSError on all."""
        results: list[Any] = []
        if complaint := together(lambda: results.append(action()) if rank_and_world_size()[0] == 0 else None):
            raise OSError(complaint)
        return from_rank_zero(results[0] if results else None)
