"""Slurm's commands, called with lists of words; what they say is read here and nowhere else."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Sequence

_PATIENCE = 60  # seconds: a busy controller answers late
_ACTIVE = ("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "REQUEUED")


class SlurmError(OSError):
    """Slurm refused or did not answer; the message is its own, in one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobState:
    """A job, or a task of a job array, as Slurm knows it now."""

    job: str  # 123 or 123_4
    state: str  # RUNNING, PENDING ...
    time_limit: str
    run_time: str
    start_time: str
    nodes: str
    reason: str  # why it waits, or how it ended
    restarts: int = 0


def _call(words: Sequence[str]) -> str:
    """Output of a command. Raises ValueError where Slurm is not installed and SlurmError where the command fails."""
    try:
        run = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except FileNotFoundError:
        raise ValueError(
            f"{words[0]} not found: this needs a node where Slurm's commands are installed (--dry-run works anywhere)"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} did not answer within {_PATIENCE} s") from None
    if run.returncode:
        message = " ".join(run.stderr.split()) or f"exit code {run.returncode}"
        raise SlurmError(f"{words[0]} failed: {message}")
    return run.stdout


def submit(script: str, *options: str) -> tuple[str, str]:
    """Submits a script; (job id, cluster or "")."""
    words = _call(["sbatch", "--parsable", *options, script]).strip().splitlines()
    job, _, cluster = words[-1].partition(";")
    if not job.isdigit():
        raise SlurmError(f"sbatch answered {words[-1]!r} instead of a job id")
    return job, cluster


_NOT_KNOWN = ("", "N/A", "(null)")


def job_states(job: str) -> list[JobState]:
    """A job's state, one for each task of an array in order; [] where Slurm has forgotten the job.

    Slurm remembers finished jobs for a few minutes; this works where no accounting database (sacct) does. Names and
    paths are not asked for: they may hold what looks like another field.
    """
    query = ["squeue", "--noheader", "--all", "--states=all", "--array", f"--jobs={job}"]
    try:
        lines = _call([*query, "--format=%i|%T|%l|%M|%S|%N|%r"]).splitlines()
        restarts = dict(line.split() for line in _call([*query, "--Format=JobArrayID:64,RestartCnt:16"]).splitlines())
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    found = []
    for line in lines:
        if len(words := line.strip().split("|", 6)) < 7:
            raise SlurmError(f"squeue answered {line!r} about job {job}")
        state = JobState(*("" if word in _NOT_KNOWN else word for word in words))
        restarted = int(restarts.get(state.job, "0"))
        found.append(dataclasses.replace(state, restarts=restarted, start_time=state.start_time or "unknown"))
    return sorted(found, key=lambda state: [int(word) for word in re.findall(r"\d+", state.job)])


def active_states(job: str) -> list[JobState]:
    """The states of a job, or of the tasks of an array, that are queued or running."""
    return [state for state in job_states(job) if state.state in _ACTIVE]


def cancel(job: str) -> None:
    _call(["scancel", job])


def signal_batch(job: str, name: str) -> None:
    """Sends a signal to the batch script alone, which passes it on to the ranks."""
    _call(["scancel", "--batch", f"--signal={name}", job])
