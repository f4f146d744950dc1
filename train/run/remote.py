"""Runs at URLs, such as `matmix train RECIPE --run-dir s3://bucket/runs/a`, for those who train and those who look."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from matmix.data.storage.remote import RemoteFolder, is_url, refuse_secrets
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.steps import MANIFEST, list_steps, step_of
from matmix.train.config import CheckpointConfig, RunConfig
from matmix.train.process.distributed import FolderGroup, agree, from_rank_zero, rank_and_world_size
from matmix.train.process.logs import EVERY_RANK
from matmix.train.run.directory import RunDirectory
from matmix.train.run.lease import LeaseLostError
from matmix.train.run.outcome import attempt_id, local_folder, outcome_path
from matmix.train.run.remote_checkpoints import RemoteCheckpoints
from matmix.train.run.sync import CHECKPOINTS, RunSync

logger = logging.getLogger(__name__)


class RemoteRun(RunDirectory):
    """A run at a URL that this process takes part in, through this node's folder. Made by `opened`."""

    def __init__(self, sync: RunSync, up_to_date: bool) -> None:
        super().__init__(sync.url)
        self.sync, self.up_to_date = sync, up_to_date

    def checkpoint_manager(self, config: CheckpointConfig) -> CheckpointManager:
        return RemoteCheckpoints(self.sync, up_to_date=self.up_to_date, **self._checkpoint_options(config))

    def lead(self, checkpoints: CheckpointManager) -> None:
        super().lead(checkpoints)
        self.sync.folder = self.path


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
    agree(sync.check, here=is_first)
    # Two jobs of one host share this folder: the lock of files tells them apart at once, and for certain.
    agree(sync.lease.acquire, here=is_first)
    try:
        starts = from_rank_zero(sync.lease.starts)
        begun = agree(lambda: (node.number, sync.begin(starts)), here=node.leads)
        yield RemoteRun(sync, dict(filter(None, begun))[node.number])
    finally:
        if node.leads:
            _push_records(sync)
        sync.lease.release()


def _push_records(sync: RunSync) -> None:
    """Uploads the records, unless another job has taken over, whose records those of this one must not replace."""
    try:
        sync.lease.check()
        sync.push_records()
    except LeaseLostError:
        return
    except OSError as error:
        logger.warning(f"records of the run are not up to date at {sync.url} ({error})", extra=EVERY_RANK)


def has_begun(config: RunConfig) -> bool:
    """Whether a run has a checkpoint, whole or not."""
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


class _Reader(RunSync):
    """A folder of this machine with what this process has read of a run at a URL. It is this process's own until that
    ends: what is in it stays as it is, whatever other processes read meanwhile."""

    def __init__(self, url: str, use: str) -> None:
        """use: a part of the folder's name. Processes that read at the same time have a folder each; one that comes
        later finds what is left in the first."""
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
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)


_reader = functools.cache(_Reader)  # one for each run and use in a process


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
    reader = _reader(str(run), "reader")
    reader.update()
    steps = reader.remote_steps()
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{reader.url} has no checkpoint of step {step}; there are: {there}")
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
    """As `fetch_run`, but with all checkpoints: their manifests, and files without content that have the right sizes.

    whole: with their content, damaged as it may be.
    """
    if not is_url(run):
        return Path(run)
    reader = _reader(str(run), "outline")
    reader.update()
    reader.forget_checkpoints()
    reader.outline(whole)
    return reader.folder
