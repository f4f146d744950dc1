"""Runs at URLs, such as `matmix train RECIPE --run-dir s3://bucket/runs/a`, for those who train and those who look."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

from matmix.data.storage.remote import RemoteFolder, is_url
from matmix.data.storage.urls import refuse_secrets
from matmix.train.checkpoint.files import MANIFEST
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.config import CheckpointConfig
from matmix.train.process.distributed import from_rank_zero, gather_objects, rank_and_world_size
from matmix.train.process.places import Place, mirror_folder
from matmix.train.run.directory import RunDirectory, take_together
from matmix.train.run.lease import Lease, LeaseLostError
from matmix.train.run.mirror import Mirror
from matmix.train.run.outcome import attempt_id, outcome_path
from matmix.train.run.remote_checkpoints import MirroredCheckpoints

Tell = Callable[[str], None]


class RemoteRun(RunDirectory):
    """A run at a URL that this process takes part in, through this node's folder. Made by `opened`."""

    def __init__(self, url: str, mirror: Mirror, lease: Lease, up_to_date: bool) -> None:
        super().__init__(url)
        self.mirror, self.lease, self.up_to_date = mirror, lease, up_to_date

    def checkpoint_manager(self, config: CheckpointConfig) -> CheckpointManager:
        return MirroredCheckpoints(
            self.mirror,
            self.lease,
            up_to_date=self.up_to_date,
            **self._checkpoint_options(config),
        )


@contextlib.contextmanager
def opened(run_dir: str, tell: Tell | None = None) -> Iterator[RunDirectory]:
    """A run to train in, on all ranks together: for a URL, holds its lease, and brings this node's folder up to date
    before and the URL afterwards.

    tell: takes a line for the user. Raises ValueError if another job is at the URL, or something that is no run, and
    OSError where the store fails; an upload of records that fails at the end costs a line of warning.
    """
    refuse_secrets(run_dir, "run_dir")
    if not is_url(run_dir):
        yield RunDirectory(run_dir)
        return
    rank, place = rank_and_world_size()[0], Place.of_node()
    tell = tell or _tell_on_stderr
    mirror = Mirror(run_dir, mirror_folder(run_dir), first=place.number == 0)
    lease = Lease(mirror.remote)
    _on_ranks(mirror.check, rank == 0)
    # Two jobs of one host share this folder: the lock of files tells them apart at once, and for certain.
    take_together(lease, tell)
    try:
        starts = from_rank_zero(lease.starts)
        took_part: list[bool] = []
        _on_ranks(lambda: took_part.append(mirror.begin(starts)), place.leads)
        up_to_date = [part for part in gather_objects((place.number, took_part)) if part[0] == place.number and part[1]]
        yield RemoteRun(run_dir, mirror, lease, up_to_date[0][1][0])
    finally:
        if place.leads and not _is_lost(lease):
            _push_records(mirror)
        lease.release()


def _on_ranks(action: Callable[[], object], acting: bool) -> None:
    """`action` on the acting ranks; raises on all what it raised on the first that failed."""
    failure: OSError | ValueError | None = None
    if acting:
        try:
            action()
        except (OSError, ValueError) as error:
            failure = error
    for error in gather_objects(failure):
        if error is not None:
            raise error


def _is_lost(lease: Lease) -> bool:
    """Whether another job has taken over, whose records those of this one must not replace."""
    try:
        lease.check()
    except LeaseLostError:
        return True
    except OSError:
        return False
    return False


def _push_records(mirror: Mirror) -> None:
    try:
        mirror.push_records()
    except OSError as error:
        print(f"warning: records of the run are not up to date at {mirror.url} ({error})", file=sys.stderr, flush=True)


def push_outcome(run_dir: str, rank: int) -> None:
    """Uploads what this process wrote last, after `opened` had ended: how it ended. One try; failing is no matter."""
    if not is_url(run_dir):
        return
    path = outcome_path(mirror_folder(run_dir), attempt_id(), rank)
    if path.is_file():
        with contextlib.suppress(OSError):
            name = path.relative_to(mirror_folder(run_dir)).as_posix()
            RemoteFolder(run_dir, patient=False).upload(path, name)


def _tell_on_stderr(text: str) -> None:
    if rank_and_world_size()[0] == 0:
        print(text, file=sys.stderr, flush=True)


def local_run(run: str | Path, *, step: int | None = None, tell: Tell = _tell_on_stderr) -> Path:
    """A run directory to read from: `run` itself, or for a URL a copy of it with one checkpoint.

    step: which checkpoint; None = the newest valid one, if there is one. The copy is this machine's, apart from the
    folder of a job that trains the run here. Raises FileNotFoundError if there is nothing at the URL, ValueError if
    there is no such checkpoint or it is damaged, and RemoteError where the store fails.
    """
    if not is_url(str(run)):
        return Path(run)
    with _reading(str(run)) as mirror:
        steps = mirror.remote_steps()
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"{mirror.url} has no checkpoint of step {step}; there are: {there}")
        wanted = [step] if step is not None else list(reversed(steps))
        for candidate in wanted:
            problem = mirror.pull(candidate, tell)
            if problem is None:
                _forget(mirror, {candidate})
                break
            if candidate == wanted[-1]:
                raise ValueError(problem)
            tell(f"warning: skipping a checkpoint: {problem}")
        return mirror.folder


def local_outline(run: str | Path, *, whole: bool = False) -> Path:
    """As `local_run`, but with all checkpoints: their manifests, and files without content that have the right sizes.

    whole: with their content, damaged as it may be.
    """
    if not is_url(str(run)):
        return Path(run)
    with _reading(str(run)) as mirror:
        _forget(mirror, set())
        mirror.outline(whole)
        return mirror.folder


@contextlib.contextmanager
def _reading(url: str) -> Iterator[Mirror]:
    folder = mirror_folder(url, "reader")
    mirror = Mirror(url, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name("reader.lock")):
        mirror.forget_records()
        if mirror.remote.read("config.toml") is None and mirror.remote.read("config.json") is None:
            raise FileNotFoundError(f"there is no run at {mirror.url}")
        mirror.pull_records()
        yield mirror


def _forget(mirror: Mirror, keep: set[int]) -> None:
    names = {mirror.path(step).name for step in keep}
    folder = mirror.folder / "checkpoints"
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if path.name not in names:
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
