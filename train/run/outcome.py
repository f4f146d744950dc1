"""How each start of a run ("attempt") ended, as files that a launcher reads afterwards. (Without torch.)

    RUN/launch/outcomes/<attempt>.json              by rank 0
    RUN/launch/outcomes/<attempt>.rank-00003.json   by another rank that failed
    RUN/launch/outcomes/<attempt>.step              the last step that rank 0 began

A process that was killed leaves no outcome, only the step.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import socket
import subprocess
import time
from pathlib import Path

from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import is_url, scratch_folder
from matmix.train.checkpoint.steps import list_steps
from matmix.train.process.exits import EXIT_OK, EXIT_STOPPED
from matmix.train.process.logs import EVERY_RANK

logger = logging.getLogger(__name__)

ATTEMPT_VARIABLE = "MATMIX_ATTEMPT"
_ALLOWED = re.compile(r"[A-Za-z0-9._-]+")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one process of an attempt ended."""

    code: int  # as in `matmix.train.process.exits`
    reason: str  # one line
    step: int  # the last step that was done, 0 where training had not begun
    saved_step: int | None  # of the newest checkpoint, None where there is none
    # Seconds since 1970 by this host's clock: for people, never to be compared between hosts.
    time: float = dataclasses.field(default_factory=time.time)
    host: str = dataclasses.field(default_factory=socket.gethostname)


_made_up = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def attempt_id() -> str:
    """Returns the name of this start of the run: MATMIX_ATTEMPT, else made from the time and the process's number; once
    the ranks have met, rank 0's. Raises ValueError for a name that is no plain file name."""
    name = os.environ.get(ATTEMPT_VARIABLE) or _made_up
    if not _ALLOWED.fullmatch(name) or name.startswith("."):
        raise ValueError(f"{ATTEMPT_VARIABLE} may hold letters, digits and . _ - only, got {name!r}")
    return name


def job_of(attempt: str) -> str:
    """Returns the job, or the local launch, that an attempt belongs to: 123 of 123.0, 123_4 of 123_4.2."""
    return attempt.rpartition(".")[0] or attempt


def adopt_attempt(name: str) -> None:
    """Takes rank 0's name for the attempt; the launchers of other nodes have given their ranks other ones."""
    global _made_up
    if os.environ.get(ATTEMPT_VARIABLE):
        os.environ[ATTEMPT_VARIABLE] = name
    else:
        _made_up = name


def local_folder(run_dir: str | Path, node: int | str | None = None) -> Path:
    """Returns this node's folder of a run: `run_dir` itself or, for a URL, one below MATMIX_SCRATCH. node: its number,
    None = as GROUP_RANK says. Raises as `scratch_folder`."""
    if not is_url(run_dir):
        return Path(run_dir)
    number = int(os.environ.get("GROUP_RANK") or 0) if node is None else node
    return scratch_folder("runs", str(run_dir)) / f"node-{number}"


def outcomes_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "launch" / "outcomes"


def outcome_path(run_dir: str | Path, attempt: str, rank: int = 0) -> Path:
    return outcomes_folder(run_dir) / f"{attempt}{f'.rank-{rank:05d}' if rank else ''}.json"


def step_path(run_dir: str | Path, attempt: str) -> Path:
    return outcomes_folder(run_dir) / f"{attempt}.step"


def write_outcome(run_dir: str | Path, outcome: Outcome, rank: int = 0) -> None:
    """Writes this process's outcome, whole or not at all, unless the directory holds no run yet (a user's mistake
    before the first step, a wrong path). Where the storage fails, a warning says so."""
    run_dir = Path(run_dir)
    if not (run_dir / "config.toml").is_file() and not (run_dir / "launch").is_dir():
        return
    values = {**dataclasses.asdict(outcome), "reason": " ".join(outcome.reason.split())}
    path = outcome_path(run_dir, attempt_id(), rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(values) + "\n")
    except OSError as error:
        logger.warning(f"how this attempt ended could not be written to {path} ({error})", extra=EVERY_RANK)


def read_outcomes(run_dir: str | Path, attempt: str) -> dict[int, Outcome]:
    """Returns rank -> outcome of an attempt, for the ranks that wrote one, in order of rank."""
    paths = {0: outcome_path(run_dir, attempt)}
    for path in sorted(outcomes_folder(run_dir).glob(f"{attempt}.rank-*.json")):
        if (number := path.name[len(attempt) + len(".rank-") : -len(".json")]).isdigit():
            paths[int(number)] = path
    outcomes = {}
    for rank, path in paths.items():
        with contextlib.suppress(OSError, ValueError, TypeError):  # it wrote none, or none that can be read
            outcomes[rank] = Outcome(**json.loads(path.read_text(encoding="utf-8")))
    return outcomes


def read_last_step(run_dir: str | Path, attempt: str) -> int | None:
    """Returns the last step that rank 0 began in an attempt; None if it began none."""
    try:
        return int(step_path(run_dir, attempt).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def newest_saved(run_dir: str | Path) -> int | None:
    """Returns the step of the newest checkpoint that was written whole (its checksums tell if it still is), or None."""
    return max(list_steps(Path(run_dir) / "checkpoints", written=True), default=None)


class Attempt:
    """Writes down how far this process came in a start of a run, and how it ended."""

    def __init__(self, run_dir: str | Path, rank: int = 0) -> None:
        self.run_dir, self.rank = Path(run_dir), rank
        self.step = 0
        """The last step that is done."""
        self._handle = -1

    def begin_step(self, step: int) -> None:
        """Notes that `step` begins: on rank 0 a write of a few bytes in place, which survives the death of the process,
        not that of the machine. Storage that fails costs the note only."""
        self.step = step - 1
        if self.rank:
            return
        with contextlib.suppress(OSError):
            if self._handle < 0:
                path = step_path(self.run_dir, attempt_id())
                path.parent.mkdir(parents=True, exist_ok=True)
                self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            # A fixed width, so that a write over the one before is whole.
            os.pwrite(self._handle, b"%012d\n" % step, 0)

    def end(self, code: int, reason: str) -> None:
        """Writes the outcome. Ranks above 0 write one only if they failed."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if self.rank == 0 or code not in (EXIT_OK, EXIT_STOPPED):
            outcome = Outcome(code=code, reason=reason, step=self.step, saved_step=newest_saved(self.run_dir))
            write_outcome(self.run_dir, outcome, self.rank)


# -- the code that runs ----------------------------------------------------------------------------------

_ROOT = Path(__file__).resolve().parents[2]


def git(*words: str) -> bytes | None:
    """Returns the output of a git command where this package lies; None where git is absent or fails, and where the
    package belongs to no working copy: it is installed, or was copied into somebody else's repository."""
    if not _run("ls-files", "train"):
        return None
    return _run(*words)


@functools.cache
def git_revision() -> str:
    """Returns the revision of the working copy that this package belongs to, with "-dirty" where it has changes; ""
    outside git. Found once: a process runs the code it began with."""
    head, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    if head is None or changes is None:
        return ""  # the package's version is all there is
    return head.decode().strip() + ("-dirty" if changes.strip() else "")


def _run(*words: str) -> bytes | None:
    command, environment = ["git", "-C", str(_ROOT), *words], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=True, env=environment).stdout
    except (OSError, subprocess.SubprocessError):
        return None
