"""RUN/launch/jobs.jsonl: one line for each submission of a run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import Any, Literal

from matmix.data.artifacts import read_json_lines


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One submission."""

    kind: Literal["slurm", "local", "prepare"]
    launch: str  # folder below RUN/launch
    time: float = dataclasses.field(default_factory=time.time)  # seconds since 1970
    command: list[str]  # as typed
    job: str = ""  # Slurm's number; "" for local runs
    cluster: str = ""  # Slurm's name of it, where it has several
    tasks: int = 0  # of a job array; 0 = none
    after: str = ""  # the job that this one waits for: the parts of a merge
    pid: int = 0  # of the launcher of a local run
    host: str = ""  # where that is
    nproc: int = 0  # its processes
    max_restarts: int = 0


def find_home(path: str) -> Path:
    """The folder with the launches of a run, a sweep or a preparation. Raises ValueError where there are none."""
    home = launch_home(path)
    for candidate in (home, preparation_home(path)):
        if (candidate / "launch").is_dir():
            return candidate
    if home.is_dir():
        raise ValueError(f"{home} was not started by `matmix launch`: it has no folder launch/")
    raise FileNotFoundError(f"run directory not found: {home}")


def preparation_home(out: str) -> Path:
    """Where the launches of a preparation are kept: beside the dataset, whose folder holds nothing but data."""
    home = launch_home(out)
    return home.with_name(home.name + ".launch")


def launch_home(run_dir: str) -> Path:
    """The folder that holds launch/ and logs/ of a run: the run directory, for one in an object store
    runs/<its name> here.

    Absolute, with symbolic links as they are: on clusters /home/user may lie elsewhere on other nodes.
    """
    if "://" in run_dir:
        return Path.cwd() / "runs" / re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.partition("://")[2]).strip("-")
    return Path(os.path.abspath(run_dir))


def run_folder(home: Path, run_dir: str) -> Path:
    """The folder with launch/ and logs/ of one of the runs whose array was launched from `home`."""
    below = Path(run_dir)
    # A sweep that was moved is told by the names of its runs.
    return below if "://" not in run_dir and below.is_relative_to(home) else home / run_dir.rsplit("/", 1)[-1]


def note_url(home: Path, run_dir: str) -> None:
    """Notes in the launches' folder of a run at a URL where the run itself is."""
    if "://" in run_dir:
        (home / "launch").mkdir(parents=True, exist_ok=True)
        (home / "launch" / "url.txt").write_text(run_dir, encoding="utf-8")


def read_url(home: Path) -> str | None:
    """The URL of a run in an object store, None for any other."""
    path = home / "launch" / "url.txt"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def add_job(home: Path, job: Job) -> None:
    append_line(home / "launch" / "jobs.jsonl", dataclasses.asdict(job))


def append_line(path: Path, values: dict[str, Any]) -> None:
    """Adds a line of JSON to a file; makes file and folder where they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def read_jobs(home: Path) -> list[Job]:
    """All submissions, oldest first."""
    return [Job(**line) for line in read_json_lines(home / "launch" / "jobs.jsonl")]
