"""Runs at URLs, such as `matmix train RECIPE --run-dir s3://bucket/runs/a`, for those who train and those who look."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from matmix.data.storage.remote import RemoteFolder, is_url
from matmix.data.storage.urls import refuse_secrets
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.steps import MANIFEST, step_of
from matmix.train.config import CheckpointConfig
from matmix.train.process.agree import agree
from matmix.train.process.distributed import FolderGroup, from_rank_zero, rank_and_world_size
from matmix.train.process.logs import EVERY_RANK
from matmix.train.run.directory import RunDirectory
from matmix.train.run.lease import Lease, LeaseLostError
from matmix.train.run.outcome import attempt_id, local_folder, outcome_path
from matmix.train.run.remote_checkpoints import RemoteCheckpoints
from matmix.train.run.sync import RunSync

logger = logging.getLogger(__name__)


class RemoteRun(RunDirectory):
    """A run at a URL that this process takes part in, through this node's folder. Made by `opened`."""

    def __init__(self, url: str, sync: RunSync, lease: Lease, up_to_date: bool) -> None:
        super().__init__(url)
        self.sync, self.lease, self.up_to_date = sync, lease, up_to_date

    def checkpoint_manager(self, config: CheckpointConfig) -> CheckpointManager:
        options = self._checkpoint_options(config)
        return RemoteCheckpoints(self.sync, self.lease, up_to_date=self.up_to_date, **options)


@contextlib.contextmanager
def opened(run_dir: str) -> Iterator[RunDirectory]:
    """A run to train in, on all ranks together: for a URL, holds its lease, and brings this node's folder up to date
    before and the URL afterwards.

    Raises ValueError if another job is at the URL, or something that is no run, and
    OSError where the store fails; where the last upload of records fails, a warning says so.
    """
    refuse_secrets(run_dir, "run_dir")
    if not is_url(run_dir):
        yield RunDirectory(run_dir)
        return
    is_first, node = rank_and_world_size()[0] == 0, FolderGroup.of_node()
    sync = RunSync(run_dir, local_folder(run_dir), first=node.number == 0)
    lease = Lease(sync.remote)
    agree(sync.check, here=is_first)
    # Two jobs of one host share this folder: the lock of files tells them apart at once, and for certain.
    agree(lease.acquire, here=is_first)
    try:
        starts = from_rank_zero(lease.starts)
        begun = agree(lambda: (node.number, sync.begin(starts)), here=node.leads)
        yield RemoteRun(run_dir, sync, lease, dict(filter(None, begun))[node.number])
    finally:
        if node.leads:
            _push_records(sync, lease)
        lease.release()


def _push_records(sync: RunSync, lease: Lease) -> None:
    """Uploads the records, unless another job has taken over, whose records those of this one must not replace."""
    try:
        lease.check()
        sync.push_records()
    except LeaseLostError:
        return
    except OSError as error:
        logger.warning(f"records of the run are not up to date at {sync.url} ({error})", extra=EVERY_RANK)


def push_outcome(run_dir: str, rank: int) -> None:
    """Uploads how this process ended, which it writes after `opened`. It tries once and says nothing if that fails."""
    if not is_url(run_dir):
        return
    folder = local_folder(run_dir)
    path = outcome_path(folder, attempt_id(), rank)
    if path.is_file():
        with contextlib.suppress(OSError):
            RemoteFolder(run_dir, patient=False).upload(path, path.relative_to(folder).as_posix())


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """A folder of this machine with what this process has read of a run at a URL. It is this process's own until that
    ends: what is in it stays as it is, whatever other processes read meanwhile."""

    sync: RunSync
    lock: FileLock
    steps: set[int] = dataclasses.field(default_factory=set)  # of the checkpoints that this process has asked for

    def forget_checkpoints(self) -> None:
        """Removes those that this process has not asked for."""
        folder = self.sync.folder / "checkpoints"
        for path in list(folder.iterdir()) if folder.is_dir() else []:
            if step_of(path.name) not in self.steps:
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)


_readings: dict[tuple[str, str], _Reading] = {}


def _read(url: str, use: str) -> _Reading:
    """This process's folder for reading a run, with its records as they are at the URL now. use: a part of its name.

    Processes that read at the same time have a folder each; one that comes later finds what is left in the first.
    """
    for number in itertools.count():
        if (url, use) in _readings:
            break
        folder = local_folder(url, f"{use}-{number}" if number else use)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f"{folder.name}.lock"))
        with contextlib.suppress(Timeout):
            lock.acquire(blocking=False)
            _readings[url, use] = _Reading(RunSync(url, folder), lock)
    reading = _readings[url, use]
    remote = reading.sync.remote
    reading.sync.forget_records()
    if remote.read("config.toml") is None and remote.read("config.json") is None:
        raise FileNotFoundError(f"there is no run at {remote.url}")
    reading.sync.pull_records()
    return reading


def fetch_run(run: str | Path, *, step: int | None = None, weights_only: bool = False) -> tuple[Path, Path | None]:
    """A run directory to read from, which is `run` itself or for a URL a copy, and in a copy its checkpoint, if there
    is one: it is whole.

    step: which checkpoint; None = the newest valid one, if there is one. weights_only: without the files that need not
    be read for the weights. The copy stays as it is for as long as this process runs. Raises FileNotFoundError if there
    is nothing at the URL, ValueError if there is no such checkpoint or it is damaged, and RemoteError where the store
    fails.
    """
    if not is_url(run):
        return Path(run), None
    reading = _read(str(run), "reader")
    sync, steps = reading.sync, reading.sync.remote_steps()
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{sync.url} has no checkpoint of step {step}; there are: {there}")
    wanted = [step] if step is not None else list(reversed(steps))
    for candidate in wanted:
        problem = sync.pull(candidate, weights_only=weights_only)
        if problem is None:
            reading.steps.add(candidate)
            reading.forget_checkpoints()
            return sync.folder, sync.path(candidate)
        if candidate == wanted[-1]:
            raise ValueError(problem)
        logger.warning(f"skipping a checkpoint: {problem}")
    return sync.folder, None


def local_outline(run: str | Path, *, whole: bool = False) -> Path:
    """As `fetch_run`, but with all checkpoints: their manifests, and files without content that have the right sizes.

    whole: with their content, damaged as it may be.
    """
    if not is_url(run):
        return Path(run)
    reading = _read(str(run), "outline")
    reading.forget_checkpoints()
    reading.sync.outline(whole)
    return reading.sync.folder
