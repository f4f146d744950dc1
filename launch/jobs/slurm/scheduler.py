"""Slurm's commands, called with lists of words; what they say is read here and nowhere else."""

import dataclasses
import re
import subprocess

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
    restarts: int


def _call(*words: str) -> str:
    """Returns a command's output. Raises ValueError where Slurm is not installed and SlurmError where it fails."""
    try:
        run = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except FileNotFoundError:
        needed = "this needs a node where Slurm's commands are installed (--dry-run works anywhere)"
        raise ValueError(f"{words[0]} not found: {needed}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} did not answer within {_PATIENCE} s") from None
    if run.returncode:
        raise SlurmError(f"{words[0]} failed: {' '.join(run.stderr.split()) or f'exit code {run.returncode}'}")
    return run.stdout


def submit(script: str, *options: str) -> tuple[str, str]:
    """Submits a script; (job id, cluster or "")."""
    answer = _call("sbatch", "--parsable", *options, script).strip().splitlines()[-1]
    job, _, cluster = answer.partition(";")
    if not job.isdigit():
        raise SlurmError(f"sbatch answered {answer!r} instead of a job id")
    return job, cluster


def job_states(job: str) -> list[JobState]:
    """Returns a job's state, one for each task of an array in order; [] where Slurm has forgotten the job. This works
    without an accounting database. Names and paths may hold what looks like another field: they are not asked for."""
    query = ("squeue", "--noheader", "--all", "--states=all", "--array", f"--jobs={job}")
    try:
        lines = _call(*query, "--format=%i|%T|%l|%M|%S|%N|%r").splitlines()
        restarts = dict(line.split() for line in _call(*query, "--Format=JobArrayID:64,RestartCnt:16").splitlines())
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    states = []
    for line in lines:
        if len(words := line.strip().split("|", 6)) < 7:
            raise SlurmError(f"squeue answered {line!r} about job {job}")
        known = ("" if word in ("N/A", "(null)") else word for word in words)
        states.append(JobState(*known, restarts=int(restarts.get(words[0], "0"))))
    return sorted(states, key=lambda state: [int(word) for word in re.findall(r"\d+", state.job)])


def active_states(job: str) -> list[JobState]:
    """Returns the states of a job, or of the tasks of an array, that are queued or running."""
    return [state for state in job_states(job) if state.state in _ACTIVE]


def cancel(job: str) -> None:
    _call("scancel", job)


def signal_batch(job: str, name: str) -> None:
    """Sends a signal to the batch script alone, which passes it on to the ranks."""
    _call("scancel", "--batch", f"--signal={name}", job)
