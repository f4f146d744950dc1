"""`matmix launch status`, `cancel` and `resubmit`. What needs torch imports it late, so that --help does not."""

import contextlib
import dataclasses
import functools
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import tyro

from matmix.data.artifacts import read_json_lines, shell_line
from matmix.launch.jobs import attempts
from matmix.launch.jobs.launches import Job, find_home, read_jobs, read_url, run_folder
from matmix.launch.jobs.slurm import scheduler
from matmix.train.recipe_files import read_toml
from matmix.train.words import duration

_RUN = "Directory of a run, a sweep or a prepared dataset; of a run at a URL, the URL."
Home = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN", help=_RUN)]


def runs_of(home: Path, job: Job) -> list[Path]:
    """Returns the run directories of a launch: `home` itself, or those of a sweep in the order of its tasks."""
    if job.kind == "prepare" or not job.tasks:
        return [home]
    folders = sorted((home / "launch" / job.launch / "tasks").iterdir(), key=lambda folder: int(folder.name))
    return [run_folder(home, read_toml(folder / "config.toml")["run_dir"]) for folder in folders]


def last_job(home: Path) -> Job:
    """Raises ValueError where nothing was submitted."""
    if not (jobs := read_jobs(home)):
        raise ValueError(f"nothing was submitted from {home}")
    return jobs[-1]


def local_process(job: Job) -> psutil.Process | None:
    """Returns the launcher of a local run, if it is alive on this host."""
    try:
        process = psutil.Process(job.pid)
        # A number that has gone to another process since: the launcher existed when it wrote the line.
        same = job.host == socket.gethostname() and process.create_time() <= job.time + 1
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, ValueError):
        return None


# -- status -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Show jobs, attempts, progress, checkpoint and logs of a run."""

    home: Home

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        print("\n".join(_status(find_home(self.home))))
        return 0


def _status(home: Path) -> list[str]:
    jobs = read_jobs(home)
    # A preparation's last job waits for its parts, which are shown with it.
    shown = [job for job in jobs[-2:] if job.job in (jobs[-1].job, jobs[-1].after)]
    lines = [str(home), *(f"  {line}" for job in shown for line in _job_lines(job))]
    if earlier := len(jobs) - len(shown):
        lines.append(f"  {'earlier':<12} {earlier} submissions in {home / 'launch' / 'jobs.jsonl'}")
    logs = f"  logs         {home / 'logs'}"
    if jobs and jobs[-1].kind == "prepare":
        return [*lines, logs]
    active, runs = False, [home]
    if jobs:
        last, runs = jobs[-1], runs_of(home, jobs[-1])
        active = bool(local_process(last) if last.kind == "local" else scheduler.active_states(last.job))
    elif (home / "launch").is_dir() and not (home / "config.toml").is_file():
        lines.append("  nothing was submitted: the last matmix launch failed before there was a job")
    if runs == [home]:
        return lines + [f"  {line}" for line in _run_lines(home, active=active)]
    names = [str(run.relative_to(home)) for run in runs]
    for run, name in zip(runs, names, strict=True):
        done = progress(records_folder(begun_phases(run)[-1]), active=active)
        # Of a run that is going on or has finished, its progress says enough.
        ended = [last for last in attempts.read_attempts(run)[-1:] if not last.finished and last.code is not None]
        last_word = "".join(f"; last attempt: {attempt.reason}" for attempt in ended)
        lines.append(f"  {name:<{max(map(len, names))}}  {done}{last_word}")
    return [*lines, logs]


def _job_lines(job: Job) -> list[str]:
    """Returns one line for each job, or task of an array, that Slurm or this host still knows."""
    started = time.strftime("%F %T", time.localtime(job.time))
    if job.kind == "local":
        state = "running" if local_process(job) else "ended"
        return [f"local        {state}, started {started} on {job.host}, launch {job.launch}"]
    if not (states := scheduler.job_states(job.job)):
        return [f"job {job.job:<8} ended (Slurm no longer knows it), submitted {started}, launch {job.launch}"]
    lines = []
    for state in states:
        said = f"({state.reason})" if state.reason != "None" else ""
        if state.state == "RUNNING":
            said = f"on {state.nodes} for {state.run_time} of {state.time_limit}"
        elif state.state == "PENDING":
            said = f"({state.reason}), expected start {state.start_time or 'unknown'}"
        again = f"restarted {state.restarts} times" if state.restarts else ""
        words = ", ".join(filter(None, (state.state, said, again)))
        lines.append(f"job {state.job:<8} {words}, launch {job.launch}")
    return lines


def _run_lines(run: Path, *, active: bool) -> list[str]:
    """Returns attempts, progress, checkpoint and logs of one run. active: its job is queued or running."""
    from matmix.train.checkpoint.manifest import list_checkpoints

    lines = []
    shown = attempts.read_attempts(run)[-5:]
    *earlier, current = begun_phases(run)
    at, place = records_folder(current), read_url(current) or current
    for attempt in shown:
        step = f", began {attempt.place}" if attempt.step is not None else ""
        running = active and attempt is shown[-1] and attempt.code is None
        ended = "running" if running else attempt.reason or attempts.describe(attempt.code)
        lines.append(f"attempt      {attempt.attempt}: {ended}{step}")
    lines += [f"{phase.name:<12} {progress(records_folder(phase), active=False)}" for phase in earlier]
    title = "progress" if current == run else current.name
    lines += [f"{title:<12} {progress(at, active=active)}", *time_lines(last_record(at))]
    if (at / "config.toml").is_file():
        listing = list_checkpoints(at / "checkpoints")
        newest = listing.resumed
        lines.append(f"checkpoint   {f'{place}/checkpoints/{newest.path.name}' if newest else 'none yet'}")
        lines += [f"             damaged: {facts.problem}" for facts in listing.damaged]
    lines.append(f"logs         {run / 'logs'}, metrics {place}/metrics.jsonl")
    return lines


def begun_phases(run: Path) -> list[Path]:
    """Returns the folders of the phases of a run that have begun, at least of the first; that of the run if it has
    none."""

    def has_begun(phase: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):  # of a run at a URL
            return (records_folder(phase) / "config.toml").is_file()
        return False

    first, *others = attempts.phases_of(run).values() or [run]
    return [first, *filter(has_begun, others)]


def records_folder(run: Path) -> Path:
    """Returns the run directory, or what a run at a URL has there, fetched. Raises FileNotFoundError or RemoteError."""
    if (url := read_url(run)) is None:
        return run
    from matmix.train.run.trained import local_outline

    return local_outline(url)


def progress(run: Path, *, active: bool) -> str:
    """Returns step, loss and, of a run that is going on, speed and estimated end, from metrics.jsonl."""
    if not (last := last_record(run)):
        return "no step reported yet"
    from matmix.train.run.directory import RunDirectory

    total = read_toml(run / "config.toml").get("steps", 0) if (run / "config.toml").is_file() else 0
    loss = "all steps of the last record skipped" if last["loss"] is None else f"loss {last['loss']:.4f}"
    text = f"step {last['step']} of {total}, {loss}"
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
    """Returns the last record of training in metrics.jsonl; {} where there is none."""
    return next((line for line in reversed(read_json_lines(run / "metrics.jsonl")) if line.get("kind") == "train"), {})


def time_lines(last: Mapping[str, Any]) -> list[str]:
    """Tells where the time of a run went, and how its ranks share the work, as its last record says."""
    lines = []
    if "goodput/seconds" in last:
        shares = {key.removeprefix("goodput/"): value for key, value in last.items() if key.startswith("goodput/")}
        spent, useful = shares.pop("seconds"), shares.pop("useful", 0.0)
        lost = [f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda s: -s[1]) if share >= 5e-4]
        words = f"; lost: {', '.join(lost)}" if lost else ""
        lines.append(f"goodput      {useful:.1%} of {duration(spent)} in useful steps{words}")
    if "ranks/slowest" in last:
        own, usual, data = (last[f"ranks/{name}"] * 1e3 for name in ("own_max", "own_median", "data_wait_max"))
        words = f"{own:.3g} ms a step of its own, median {usual:.3g} ms; longest wait for data {data:.3g} ms"
        lines.append(f"ranks        rank {last['ranks/slowest']:.0f} is the slowest: {words}")
    return lines


# -- cancel -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancel:
    """Tell a run to save, then end its jobs."""

    home: Home
    grace: float = 300
    """Seconds that saving may take."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Tells all jobs to save, waits, then ends them; exit code 1 where one had to be ended. None is requeued."""
        home = find_home(self.home)
        last = last_job(home)
        waiting = _tell_process(last) if last.kind == "local" else _tell_slurm(home)
        for name in waiting:
            print(f"{name}: told to save and end, waiting up to {self.grace:.0f} s")
        deadline, left = time.monotonic() + self.grace, set(waiting)
        while left and time.monotonic() < deadline:
            time.sleep(0.5)
            left = {name for name in left if waiting[name][0]()}
        for name, (_, end) in waiting.items():
            if name in left:
                end()
            print(f"{name}: {f'not saved within {self.grace:.0f} s, ended' if name in left else 'ended by itself'}")
        return 1 if left else 0


# Of a job or process that was told to save and end: whether it is running still, and what ends it.
_Stopping = tuple[Callable[[], object], Callable[[], None]]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resubmit:
    """Start the last launch again: same code, same config."""

    home: Home

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Submits what is not finished, or runs a local launch. Raises ValueError while it is queued or running."""
        from matmix.launch.jobs.hosts import run_local

        home = find_home(self.home)
        last, ending = last_job(home), f"{shell_line('matmix', 'launch', 'cancel', home)} ends it"
        if last.kind == "local":
            if local_process(last):
                raise ValueError(f"process {last.pid} is still running this; {ending}")
            return run_local(home, last)
        # The merge of a preparation waits for its parts.
        if active := [state.job for name in (last.after, last.job) if name for state in scheduler.active_states(name)]:
            raise ValueError(f"job {', '.join(active)} is still queued or running; {ending}")
        job = _resubmit(home, last)
        print("Nothing to do: it is finished" if job is None else f"Submitted job {job.job} (launch {job.launch})")
        return 0


def _resubmit(home: Path, job: Job) -> Job | None:
    """Submits what is not finished; None if all is."""
    from matmix.launch.jobs.slurm import submit

    if job.kind == "prepare":
        return submit.resubmit_preparation(home, job)
    # A run is finished where its last attempt is.
    last_attempts = [attempts.read_attempts(run)[-1:] for run in runs_of(home, job)]
    open_tasks = [number for number, last in enumerate(last_attempts) if not any(attempt.finished for attempt in last)]
    if not open_tasks:
        return None
    script = home / "launch" / job.launch / submit.SCRIPT
    options = [submit.array_option(script, open_tasks)] if job.tasks else []
    return submit.submit_scripts(home, job, {script.name: options})
