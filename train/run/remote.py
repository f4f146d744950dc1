"""Runs at URLs, such as `matmix train RECIPE --run-dir s3://bucket/runs/a`, for those who train them."""

import contextlib
import logging
from collections.abc import Iterator

import torch.distributed as dist

from matmix.data.storage.remote import RemoteFolder, is_url, refuse_secrets
from matmix.train.checkpoint.manager import CheckpointManager, Keep, Store
from matmix.train.checkpoint.manifest import matches, read_manifest
from matmix.train.checkpoint.steps import MANIFEST, list_steps, step_name
from matmix.train.config import RunConfig
from matmix.train.process import distributed
from matmix.train.process.distributed import FolderGroup, agree, complaint, from_rank_zero, gather_objects
from matmix.train.process.logs import EVERY_RANK
from matmix.train.run.directory import RunDirectory
from matmix.train.run.lock import LeaseLostError
from matmix.train.run.outcome import attempt_id, local_folder, outcome_path
from matmix.train.run.sync import CHECKPOINTS, RunSync

logger = logging.getLogger(__name__)


class UploadedStore(Store):
    """Checkpoints of a run at a URL: written into each node's folder, then uploaded; only what is uploaded counts."""

    def __init__(self, sync: RunSync, *, up_to_date: bool, keep_last: int) -> None:
        """sync: rank 0 holds its lease; up_to_date: this node took part in the last start; keep_last: of those here."""
        super().__init__(sync.folder / CHECKPOINTS, f"{sync.url}/{CHECKPOINTS}", FolderGroup.of_node())
        self.sync, self.up_to_date, self.keep_last = sync, up_to_date, keep_last
        self._is_first = distributed.rank_and_world_size()[0] == 0
        self._uploaded: list[int] = []  # valid at the URL, as far as is known; the same on all ranks

    def steps(self) -> list[int]:
        return list(self._uploaded)

    def looks_whole(self, step: int) -> bool:
        return step in self._uploaded

    def publish(self, step: int, group: dist.ProcessGroup | None) -> None:
        """Uploads the files of every node, the records, and then the manifest that makes the checkpoint valid."""
        self._uploaded = [uploaded for uploaded in self._uploaded if uploaded != step]
        agree(lambda: self.sync.withdraw(step), here=self._is_first, group=group)
        agree(lambda: self.sync.push(step), here=self.folder.leads, group=group)
        agree(lambda: self.sync.publish(step), here=self._is_first, group=group)
        self._uploaded = sorted([*self._uploaded, step])

    def clear_failed(self, step: int) -> None:
        self.remove_here({step, *list_steps(self.directory, written=True)[-self.keep_last :]})

    def remove_all_but(self, written: int, keep: Keep) -> None:
        kept = {written, *keep(self._uploaded)}
        self._uploaded = [step for step in self._uploaded if step in kept]
        if self.folder.leads:
            self.remove_here({written, *self._uploaded[-self.keep_last :]})
        if self._is_first:
            try:
                self.sync.remove_all_but({*self._uploaded, written})
            except OSError as error:
                logger.warning(f"old checkpoints of {self.sync.url} could not be removed: {error}")

    def steps_to_try(self) -> list[int]:
        """Returns those at the URL. A checkpoint that the last start wrote but could not upload is uploaded first."""
        steps = agree(self.sync.remote_steps, here=self._is_first)[0]
        if (unsent := self._find_unsent(max(steps, default=-1))) is not None:
            try:
                self.publish(unsent, None)
            except OSError as error:
                logger.warning(f"the checkpoint of step {unsent} still cannot be uploaded ({complaint(error)})")
            else:
                steps = sorted({*steps, unsent})
                logger.info(f"uploaded the checkpoint of step {unsent}, which the last start of this run could not")
        self._uploaded = list(steps)
        return steps

    def find_problem(self, step: int, *, weights_only: bool) -> str | None:
        """Fetches the checkpoint to every node; says what is wrong with it on any of them."""
        problems = agree(lambda: self.sync.pull(step, weights_only=weights_only), here=self.folder.leads)
        if problem := next(filter(None, problems), None):
            self._uploaded.remove(step)
        return problem

    def _find_unsent(self, newest: int) -> int | None:
        """Returns the newest step after `newest` of which the nodes together hold every file, undamaged."""
        here: dict[int, tuple[set[str], set[str]]] = {}
        if self.folder.leads and self.up_to_date:
            for step in filter(lambda step: step > newest, list_steps(self.directory, written=True)):
                with contextlib.suppress(ValueError, OSError):
                    path = self.directory / step_name(step)
                    files = read_manifest(path)["files"]
                    here[step] = set(files), {name for name, entry in files.items() if matches(path / name, entry)}
        nodes = [held for held in gather_objects(here if self.folder.leads else None) if held is not None]
        for step in sorted(set.intersection(*map(set, nodes)), reverse=True):
            held = set.union(*(node[step][1] for node in nodes))
            if all(held >= node[step][0] for node in nodes):
                return step
        return None


class RemoteRun(RunDirectory):
    """A run at a URL that this process takes part in, through this node's folder. Made by `opened`."""

    def __init__(self, sync: RunSync, up_to_date: bool) -> None:
        super().__init__(sync.url)
        self.sync, self.up_to_date = sync, up_to_date

    def store(self, keep_last: int) -> Store:
        return UploadedStore(self.sync, up_to_date=self.up_to_date, keep_last=keep_last)

    def lead(self, checkpoints: CheckpointManager) -> None:
        super().lead(checkpoints)
        self.sync.folder = self.path


@contextlib.contextmanager
def opened(run_dir: str) -> Iterator[RunDirectory]:
    """Gives a run to train in, on all ranks together: for a URL, holds its lease, and brings this node's folder up to
    date before and the URL afterwards. Raises ValueError for a run of another job, or what is no run, and OSError where
    the store fails before."""
    refuse_secrets(run_dir, "run_dir")
    if not is_url(run_dir):
        yield RunDirectory(run_dir)
        return
    is_first, node = distributed.rank_and_world_size()[0] == 0, FolderGroup.of_node()
    sync = RunSync(run_dir, local_folder(run_dir), first=node.number == 0)
    agree(sync.check, here=is_first)
    # Two jobs of one host share this folder: the lock of files tells them apart at once, and for certain.
    agree(sync.lease.acquire, here=is_first)
    try:
        starts = from_rank_zero(sync.lease.starts)
        begun = agree(lambda: (node.number, sync.begin(starts)), here=node.leads)
        yield RemoteRun(sync, dict(filter(None, begun))[node.number])
    finally:
        if node.leads:
            # Where another job has taken over the run, its records must not be replaced.
            with contextlib.suppress(LeaseLostError):
                try:
                    sync.lease.check()
                    sync.push_records()
                except OSError as error:
                    logger.warning(f"records of the run are not up to date at {sync.url} ({error})", extra=EVERY_RANK)
        sync.lease.release()


def has_begun(config: RunConfig) -> bool:
    """Returns whether a run has a checkpoint, whole or not."""
    if not is_url(config.run_dir):
        return bool(list_steps(RunDirectory(config.run_dir).checkpoints))
    return any(name.endswith(f"/{MANIFEST}") for name in RemoteFolder(config.run_dir).sizes(CHECKPOINTS))


def push_outcome(run_dir: str, rank: int) -> None:
    """Uploads how this process ended, which it writes after `opened`. It tries once and says nothing if that fails."""
    folder = local_folder(run_dir)
    path = outcome_path(folder, attempt_id(), rank)
    if is_url(run_dir) and path.is_file():
        with contextlib.suppress(OSError):
            RemoteFolder(run_dir, patient=False).upload(path, path.relative_to(folder).as_posix())
