"""`matmix launch cancel` and `resubmit`: ends a launch so that it is saved, and starts the same launch again."""

from __future__ import annotations

import dataclasses
import functools
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from matmix.data.artifacts import shell_line
from matmix.launch.jobs import attempts
from matmix.launch.jobs.launches import Job, find_home, read_jobs
from matmix.launch.jobs.slurm import scheduler
from matmix.launch.jobs.slurm.script import array_option
from matmix.launch.jobs.status import Home, local_process, runs_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancel:
    """Tell a run to save, then end its jobs."""

    home: Home
    grace: float = 300
    """Seconds that saving may take."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Cancels; exit code 1 where a job did not save in time."""
        return 0 if cancel(find_home(self.home), self.grace) else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resubmit:
    """Start the last launch again: same code, same config."""

    home: Home

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Submits, or for a local launch runs; the exit code."""
        from matmix.launch.jobs.local import run_local  # imports torch, and --help should not

        home = find_home(self.home)
        last = last_job(home)
        if last.kind == "local":
            if local_process(last):
                raise ValueError(f"process {last.pid} is still running this; {_ending(home)} ends it")
            return run_local(home, last)
        job = resubmit(home, last)
        print("Nothing to do: it is finished" if job is None else f"Submitted job {job.job} (launch {job.launch})")
        return 0


def last_job(home: Path) -> Job:
    """Raises ValueError where nothing was submitted."""
    if not (jobs := read_jobs(home)):
        raise ValueError(f"nothing was submitted from {home}")
    return jobs[-1]


# -- cancel -----------------------------------------------------------------------------------------------------------

# Of a job or process that was told to save and end: whether it is running still, and what ends it.
_Stopping = tuple[Callable[[], object], Callable[[], None]]


def cancel(home: Path, grace: float) -> bool:
    """Tells all jobs of `home` to save, waits up to `grace` seconds, then ends them; False if one had to be ended.

    Jobs that wait in the queue are removed at once, and none of them is requeued.
    """
    last = last_job(home)
    waiting = _tell_process(last) if last.kind == "local" else _tell_slurm(home)
    for name in waiting:
        print(f"{name}: told to save and end, waiting up to {grace:.0f} s")
    deadline, left = time.monotonic() + grace, waiting
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        left = {name: job for name, job in left.items() if job[0]()}
    for name, (_, end) in waiting.items():
        if name in left:
            end()
            print(f"{name}: not saved within {grace:.0f} s, ended")
        else:
            print(f"{name}: ended by itself")
    return not left


def _tell_slurm(home: Path) -> dict[str, _Stopping]:
    any_active, waiting = False, {}
    for job in read_jobs(home):
        if not job.job or not (states := scheduler.active_states(job.job)):
            continue
        any_active = True
        # Keeps the job's own script from requeueing it.
        for number, run in enumerate(runs_of(home, job)):
            attempts.mark_cancelled(run, f"{job.job}_{number}" if job.tasks else job.job)
        for state in states:
            if state.state == "RUNNING" and job.kind == "slurm":
                scheduler.signal_batch(state.job, "USR2")
                active, end = scheduler.active_states, scheduler.cancel
                waiting[f"job {state.job}"] = functools.partial(active, state.job), functools.partial(end, state.job)
            else:
                scheduler.cancel(state.job)
                print(f"job {state.job}: cancelled while {state.state.lower()}")
    if not any_active:
        print("no job is queued or running")
    return waiting


def _tell_process(job: Job) -> dict[str, _Stopping]:
    if job.host != socket.gethostname():
        raise ValueError(f"this run was started on {job.host}: cancel it there")
    if (process := local_process(job)) is None:
        print("it is not running")
        return {}
    process.send_signal(signal.SIGTERM)
    # Its ranks end with it.
    return {f"process {job.pid}": (lambda: local_process(job), process.kill)}


# -- resubmit ---------------------------------------------------------------------------------------------------------


def _ending(home: Path) -> str:
    """The command that ends a launch."""
    return shell_line("matmix", "launch", "cancel", home)


def resubmit(home: Path, job: Job) -> Job | None:
    """Submits a launch again: same code, same config; of an array what is not finished. None if all is.

    Raises ValueError while a job of it is still queued or running.
    """
    from matmix.launch.jobs.slurm.prepare import resubmit_preparation  # imports torch, and --help should not
    from matmix.launch.jobs.slurm.submit import SCRIPT, submit_scripts

    # The merge of a preparation waits for its parts.
    if active := [state.job for name in (job.after, job.job) if name for state in scheduler.active_states(name)]:
        raise ValueError(f"job {', '.join(active)} is still queued or running; {_ending(home)} ends it")
    if job.kind == "prepare":
        return resubmit_preparation(home, job)
    # A run is finished where its last attempt is.
    last_attempts = [attempts.read_attempts(run)[-1:] for run in runs_of(home, job)]
    open_tasks = [number for number, last in enumerate(last_attempts) if not any(attempt.finished for attempt in last)]
    if not open_tasks:
        return None
    options = [array_option(home / "launch" / job.launch / SCRIPT, open_tasks)] if job.tasks else []
    return submit_scripts(home, job, {SCRIPT: options})
