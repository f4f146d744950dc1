"""`matmix launch status RUN`: jobs, attempts, progress, checkpoint and logs of a run, as lines for a person.

What imports torch is imported by the functions that need it, so that --help does not wait for it.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import tyro

from matmix.data.artifacts import read_json_lines
from matmix.launch.jobs.attempts import describe, read_attempts
from matmix.launch.jobs.launches import Job, find_home, read_jobs, read_url, run_folder
from matmix.launch.jobs.slurm import scheduler
from matmix.train.recipe_files import read_toml
from matmix.train.words import duration

_SHOWN = 5  # attempts
Home = Annotated[
    tyro.conf.Positional[str],
    tyro.conf.arg(metavar="RUN", help="Directory of a run, a sweep or a prepared dataset; of a run at a URL, the URL."),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Show jobs, attempts, progress, checkpoint and logs of a run."""

    home: Home

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Prints what is known; the exit code."""
        print("\n".join(status_lines(find_home(self.home))))
        return 0


def status_lines(home: Path) -> list[str]:
    """Tells what is known of the launches in `home`. Raises SlurmError if Slurm does not answer."""
    jobs = read_jobs(home)
    # A preparation's last job waits for its parts, which are shown with it.
    shown = [job for job in jobs[-2:] if jobs and job.job in (jobs[-1].job, jobs[-1].after)]
    lines = [str(home), *(f"  {line}" for job in shown for line in job_lines(job))]
    if earlier := len(jobs) - len(shown):
        lines.append(f"  {'earlier':<12} {earlier} submissions in {home / 'launch' / 'jobs.jsonl'}")
    logs = f"  logs         {home / 'logs'}"
    if jobs and jobs[-1].kind == "prepare":
        return [*lines, logs]
    active = bool(jobs) and is_active(jobs[-1])
    runs = runs_of(home, jobs[-1]) if jobs else [home]
    if not jobs and (home / "launch").is_dir():
        lines.append("  nothing was submitted: the last matmix launch failed before there was a job")
    if runs == [home]:
        return lines + [f"  {line}" for line in run_lines(home, active=active)]
    names = [str(run.relative_to(home)) for run in runs]
    for run, name in zip(runs, names, strict=True):
        done = progress(records_folder(run), active=active)
        lines.append(f"  {name:<{max(map(len, names))}}  {done}{_last_word(run)}")
    return [*lines, logs]


def runs_of(home: Path, job: Job) -> list[Path]:
    """The run directories of a launch: `home` itself, or those of a sweep in the order of its tasks."""
    if job.kind == "prepare" or not job.tasks:
        return [home]
    folders = sorted((home / "launch" / job.launch / "tasks").iterdir(), key=lambda folder: int(folder.name))
    return [run_folder(home, read_toml(folder / "config.toml")["run_dir"]) for folder in folders]


def is_active(job: Job) -> bool:
    """Returns True for a job that is queued or running."""
    return bool(local_process(job) if job.kind == "local" else scheduler.active_states(job.job))


def job_lines(job: Job) -> list[str]:
    """One line for each job, or task of an array, that Slurm or this host still knows."""
    started = time.strftime("%F %T", time.localtime(job.time))
    if job.kind == "local":
        state = "running" if local_process(job) else "ended"
        return [f"local        {state}, started {started} on {job.host}, launch {job.launch}"]
    if not (states := scheduler.job_states(job.job)):
        return [f"job {job.job:<8} ended (Slurm no longer knows it), submitted {started}, launch {job.launch}"]
    lines = []
    for state in states:
        running = f"on {state.nodes} for {state.run_time} of {state.time_limit}"
        pending = f"({state.reason}), expected start {state.start_time}"
        other = f"({state.reason})" if state.reason != "None" else ""
        said = {"RUNNING": running, "PENDING": pending}.get(state.state, other)
        again = f"restarted {state.restarts} times" if state.restarts else ""
        words = ", ".join(filter(None, (state.state, said, again)))
        lines.append(f"job {state.job:<8} {words}, launch {job.launch}")
    return lines


def local_process(job: Job) -> psutil.Process | None:
    """The launcher of a local run, if it is alive on this host."""
    try:
        process = psutil.Process(job.pid)
        # A number that has gone to another process since: the launcher existed when it wrote the line.
        same = job.host == socket.gethostname() and process.create_time() <= job.time + 1
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, ValueError):
        return None


def run_lines(run: Path, *, active: bool) -> list[str]:
    """Attempts, progress, checkpoint and logs of one run. active: its job is queued or running."""
    from matmix.train.checkpoint.manifest import list_checkpoints

    lines = []
    attempts = read_attempts(run)[-_SHOWN:]
    at, place = records_folder(run), read_url(run) or run
    for attempt in attempts:
        step = f", began step {attempt.step}" if attempt.step is not None else ""
        running = active and attempt is attempts[-1] and attempt.code is None
        ended = "running" if running else attempt.reason or describe(attempt.code)
        lines.append(f"attempt      {attempt.attempt}: {ended}{step}")
    lines += [f"progress     {progress(at, active=active)}", *time_lines(last_record(at))]
    if (at / "config.toml").is_file():
        listing = list_checkpoints(at / "checkpoints")
        newest = listing.resumed
        lines.append(f"checkpoint   {f'{place}/checkpoints/{newest.path.name}' if newest else 'none yet'}")
        lines += [f"             damaged: {facts.problem}" for facts in listing.damaged]
    lines.append(f"logs         {run / 'logs'}, metrics {place}/metrics.jsonl")
    return lines


def records_folder(run: Path) -> Path:
    """Where metrics and checkpoints can be read: the run directory, or what a run at a URL has there, fetched.

    Raises FileNotFoundError or RemoteError where the URL cannot be read.
    """
    url = read_url(run)
    if url is None:
        return run
    from matmix.train.run.trained import local_outline

    return local_outline(url)


def _last_word(run: Path) -> str:
    # Of a run that is going on or has finished, its progress says enough.
    last = [attempt for attempt in read_attempts(run)[-1:] if not attempt.finished and attempt.code is not None]
    return "".join(f"; last attempt: {attempt.reason}" for attempt in last)


def progress(run: Path, *, active: bool) -> str:
    """Step, loss and, of a run that is going on, speed and estimated end, from metrics.jsonl."""
    if not (last := last_record(run)):
        return "no step reported yet"
    total = read_toml(run / "config.toml").get("steps", 0) if (run / "config.toml").is_file() else 0
    loss = "all steps of the last record skipped" if last["loss"] is None else f"loss {last['loss']:.4f}"
    text = f"step {last['step']} of {total}, {loss}"
    from matmix.train.run.directory import RunDirectory

    summary = RunDirectory(run).read_summary()
    if summary is not None and summary["step"] >= total:
        return f"{text}, finished, validation loss {summary['validation']['loss']:.4f}"
    text += f", {duration(time.time() - (run / 'metrics.jsonl').stat().st_mtime)} ago"
    if not active:
        return text
    seconds = last["seconds_per_step"]
    rate = f"{1 / seconds:.3g} steps/s" if seconds > 0 else "speed unknown"
    return f"{text}, {rate}, {duration(seconds * (total - last['step']))} to go at that speed"


def last_record(run: Path) -> dict[str, Any]:
    """The last record of training in metrics.jsonl; {} where there is none."""
    return next((line for line in reversed(read_json_lines(run / "metrics.jsonl")) if line.get("kind") == "train"), {})


def time_lines(last: Mapping[str, Any]) -> list[str]:
    """Where the time of a run went, and how its ranks share the work, as its last record says."""
    lines = []
    if "goodput/seconds" in last:
        shares = {key.removeprefix("goodput/"): value for key, value in last.items() if key.startswith("goodput/")}
        spent, useful = shares.pop("seconds"), shares.pop("useful", 0.0)
        lost = [f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda s: -s[1]) if share >= 5e-4]
        words = f"; lost: {', '.join(lost)}" if lost else ""
        lines.append(f"goodput      {useful:.1%} of {duration(spent)} in useful steps{words}")
    if "ranks/slowest" in last:
        own, usual, data = (last[f"ranks/{name}"] * 1e3 for name in ("own_max", "own_median", "data_wait_max"))
        lines.append(
            f"ranks        rank {last['ranks/slowest']:.0f} is the slowest: {own:.3g} ms a step of its own, median "
            f"{usual:.3g} ms; longest wait for data {data:.3g} ms"
        )
    return lines
