"""How each start of a run ("attempt") ended, as files in the run directory that a launcher reads afterwards.

    RUN/launch/outcomes/<attempt>.json              by rank 0
    RUN/launch/outcomes/<attempt>.rank-00003.json   by another rank that failed
    RUN/launch/outcomes/<attempt>.step              the last step that rank 0 began

A process that was killed leaves no outcome, only the step. This file needs the standard library alone: launchers use
it, and a process whose import of torch failed has an outcome too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import socket
import sys
import time
from pathlib import Path

ATTEMPT_VARIABLE = "MATMIX_ATTEMPT"
_ALLOWED = re.compile(r"[A-Za-z0-9._-]+")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one process of an attempt ended."""

    code: int  # as in `matmix.train.exits`
    reason: str  # one line
    step: int  # the last step that was done, 0 where training had not begun
    saved_step: int | None  # of the newest checkpoint, None where there is none
    time: float  # seconds since 1970 by this host's clock: for people, never to be compared between hosts
    host: str


@functools.cache
def _made_up_attempt() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def attempt_id() -> str:
    """Name of this start of the run: MATMIX_ATTEMPT, else made from the time and the process's number.

    Raises ValueError for a name that is no plain file name.
    """
    name = os.environ.get(ATTEMPT_VARIABLE) or _made_up_attempt()
    if not _ALLOWED.fullmatch(name) or name.startswith("."):
        raise ValueError(f"{ATTEMPT_VARIABLE} may hold letters, digits and . _ - only, got {name!r}")
    return name


def outcomes_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "launch" / "outcomes"


def outcome_path(run_dir: str | Path, attempt: str, rank: int = 0) -> Path:
    return outcomes_folder(run_dir) / f"{attempt}{f'.rank-{rank:05d}' if rank else ''}.json"


def step_path(run_dir: str | Path, attempt: str) -> Path:
    return outcomes_folder(run_dir) / f"{attempt}.step"


def write_outcome(
    run_dir: str | Path,
    *,
    code: int,
    reason: str,
    step: int,
    saved_step: int | None,
    rank: int = 0,
    attempt: str | None = None,
) -> Path | None:
    """Writes this process's outcome, whole or not at all; returns its path.

    A directory that holds no run yet (a user's mistake before the first step, a wrong path) is left alone: then, and
    where the storage fails (which costs a line of warning), the result is None. attempt: by default `attempt_id()`.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "config.toml").is_file() and not (run_dir / "launch").is_dir():
        return None
    outcome = Outcome(
        code=code,
        reason=" ".join(reason.split()),
        step=step,
        saved_step=saved_step,
        time=time.time(),
        host=socket.gethostname(),
    )
    path = outcome_path(run_dir, attempt or attempt_id(), rank)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        print(f"warning: how this attempt ended could not be written to {path} ({error})", file=sys.stderr, flush=True)
        return None
    return path


def read_outcome(path: Path) -> Outcome | None:
    """An outcome file's content, None where there is no readable one."""
    try:
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def read_outcomes(run_dir: str | Path, attempt: str) -> dict[int, Outcome]:
    """Rank -> outcome of an attempt, for the ranks that wrote one, in order of rank."""
    found = {0: read_outcome(outcome_path(run_dir, attempt))}
    for path in sorted(outcomes_folder(run_dir).glob(f"{attempt}.rank-*.json")):
        if (number := path.name[len(attempt) + len(".rank-") : -len(".json")]).isdigit():
            found[int(number)] = read_outcome(path)
    return {rank: outcome for rank, outcome in found.items() if outcome is not None}


def read_last_step(run_dir: str | Path, attempt: str) -> int | None:
    """The last step that rank 0 began in an attempt; None if it began none."""
    try:
        return int(step_path(run_dir, attempt).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


class StepFile:
    """Keeps `<attempt>.step` up to date: one write of a few bytes in place a step, nothing forced to the disk.

    It survives the death of the process, not that of the machine. Storage that fails costs the file, not the run.
    """

    def __init__(self, run_dir: str | Path, attempt: str | None = None) -> None:
        self.handle = -1
        path = step_path(run_dir, attempt or attempt_id())
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def begin(self, step: int) -> None:
        if self.handle >= 0:
            with contextlib.suppress(OSError):
                # A fixed width, so that a write over the one before is whole.
                os.pwrite(self.handle, b"%012d\n" % step, 0)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
