"""`matmix launch cancel` and `resubmit`: ends a launch so that it is saved, and starts the same launch again."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from matmix.launch.jobs import attempts
from matmix.launch.jobs.local import run_local
from matmix.launch.jobs.records import Job, add_job, find_home, read_jobs
from matmix.launch.jobs.slurm import scheduler
from matmix.launch.jobs.slurm.prepare import resubmit_preparation
from matmix.launch.jobs.slurm.script import array_option
from matmix.launch.jobs.status import Home, local_process, task_runs


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
        home = find_home(self.home)
        if last_job(home).kind == "local":
            return resubmit_local(home)
        job = resubmit(home)
        print("Nothing to do: it is finished" if job is None else f"Submitted job {job.job} (launch {job.launch})")
        return 0


def last_job(home: Path) -> Job:
    """Raises ValueError where nothing was submitted."""
    jobs = read_jobs(home)
    if not jobs:
        raise ValueError(f"nothing was submitted from {home}")
    return jobs[-1]


# -- cancel -----------------------------------------------------------------------------------------------------------


def cancel(home: Path, grace: float) -> bool:
    """Tells all jobs of `home` to save, waits up to `grace` seconds, then ends them; False if one had to be ended.

    Jobs that wait in the queue are removed at once, and none of them is requeued.
    """
    jobs = read_jobs(home)
    if not jobs:
        raise ValueError(f"nothing was submitted from {home}")
    if jobs[-1].kind == "local":
        return _cancel_local(jobs[-1], grace)
    found = False
    waiting: list[str] = []
    for job in jobs:
        states = [state for state in scheduler.job_states(job.job) if not state.is_over] if job.job else []
        found = found or bool(states)
        for state in states:
            _mark(home, job, state.job)
        for state in states:
            if state.state == "RUNNING" and job.kind == "slurm":
                scheduler.signal_batch(state.job, "USR2")
                waiting.append(state.job)
                print(f"job {state.job}: told to save and end, waiting up to {grace:.0f} s")
            else:
                scheduler.cancel(state.job)
                print(f"job {state.job}: cancelled while {state.state.lower()}")
    if not found:
        print("no job is queued or running")
    return _wait_for_end(waiting, grace)


def _mark(home: Path, job: Job, name: str) -> None:
    """Keeps the job's own script from requeueing it."""
    runs = task_runs(home, job) if job.kind == "slurm" and job.tasks else [home]
    for number, run in enumerate(runs):
        attempts.mark_cancelled(run, f"{job.job}_{number}" if job.tasks else name)


def _wait_for_end(names: list[str], grace: float) -> bool:
    deadline, left = time.monotonic() + grace, list(names)
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        left = [name for name in left if not all(state.is_over for state in scheduler.job_states(name))]
    for name in left:
        scheduler.cancel(name)
        print(f"job {name}: not saved within {grace:.0f} s, cancelled")
    for name in set(names) - set(left):
        print(f"job {name}: ended by itself")
    return not left


def _cancel_local(job: Job, grace: float) -> bool:
    if job.host != socket.gethostname():
        raise ValueError(f"this run was started on {job.host}: cancel it there")
    process = local_process(job)
    if process is None:
        print("it is not running")
        return True
    process.send_signal(signal.SIGTERM)
    print(f"process {job.pid}: told to save and end, waiting up to {grace:.0f} s")
    deadline = time.monotonic() + grace
    while local_process(job) and time.monotonic() < deadline:
        time.sleep(0.2)
    if local_process(job) is None:
        print(f"process {job.pid}: ended by itself")
        return True
    process.kill()  # its ranks end with it
    print(f"process {job.pid}: not saved within {grace:.0f} s, killed")
    return False


# -- resubmit ---------------------------------------------------------------------------------------------------------


def resubmit(home: Path) -> Job | None:
    """Submits the last launch again: same code, same config; of an array what is not finished. None if all is.

    Raises ValueError while a job of it is still queued or running, and for local launches.
    """
    job = last_job(home)
    assert job.kind != "local", "local launches are run again by their caller"
    active = [state.job for state in scheduler.job_states(job.job) if not state.is_over]
    if active:
        raise ValueError(f"job {', '.join(active)} is still queued or running; matmix launch cancel {home} ends it")
    if job.kind == "prepare":
        return resubmit_preparation(home, job)
    options: list[str] = []
    if job.tasks:
        runs = task_runs(home, job)
        open_tasks = [number for number, run in enumerate(runs) if not is_finished(run)]
        if not open_tasks:
            return None
        options = [array_option(home / "launch" / job.launch / "job.sbatch", open_tasks)]
    elif is_finished(home):
        return None
    return submit_again(home, job, "job.sbatch", options)


def submit_again(home: Path, job: Job, script: str, options: list[str]) -> Job:
    """Submits a script of an earlier launch and records that."""
    number, cluster = scheduler.submit(str(home / "launch" / job.launch / script), *options)
    again = dataclasses.replace(job, job=number, cluster=cluster, time=time.time())
    add_job(home, again)
    return again


def is_finished(run: Path) -> bool:
    """Whether the last attempt of a run reached its end."""
    found = attempts.read_attempts(run)
    return bool(found) and found[-1].finished


def resubmit_local(home: Path) -> int:
    """Runs the last local launch again; returns its exit code. Raises ValueError while it runs."""
    job = last_job(home)
    if local_process(job) and job.host == socket.gethostname():
        raise ValueError(f"process {job.pid} is still running this; matmix launch cancel {home} ends it")
    again = dataclasses.replace(job, time=time.time(), pid=os.getpid(), host=socket.gethostname())
    add_job(home, again)
    return run_local(home, again)
