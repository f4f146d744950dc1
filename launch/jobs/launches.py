"""Records the launches of a run in RUN/launch/jobs.jsonl, and in RUN/launch/<launch id>/ all that one start depends on
(config, code, revision, packages), so that a job requeued weeks later runs the same."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Literal

from matmix.data.artifacts import read_json_lines
from matmix.data.storage.files import first_free
from matmix.train.run.outcome import git


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
    """Finds the folder with the launches of a run, a sweep or a preparation. Raises ValueError or FileNotFoundError."""
    home = launch_home(path)
    for candidate in (home, preparation_home(path)):
        if (candidate / "launch").is_dir():
            return candidate
    if home.is_dir():
        raise ValueError(f"{home} was not started by `matmix launch`: it has no folder launch/")
    raise FileNotFoundError(f"run directory not found: {home}")


def preparation_home(out: str) -> Path:
    """Returns where the launches of a preparation are kept: beside the dataset, whose folder holds nothing but data."""
    home = launch_home(out)
    return home.with_name(home.name + ".launch")


def launch_home(run_dir: str) -> Path:
    """Returns the folder that holds launch/ and logs/ of a run: the run directory, for one in an object store
    runs/<its name> here; absolute, with symbolic links as they are, which may lead elsewhere on other nodes."""
    if "://" in run_dir:
        return Path.cwd() / "runs" / re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.partition("://")[2]).strip("-")
    return Path(os.path.abspath(run_dir))


def run_folder(home: Path, run_dir: str) -> Path:
    """Returns the folder with launch/ and logs/ of one of the runs whose array was launched from `home`."""
    below = Path(run_dir)
    # A sweep that was moved is told by the names of its runs.
    return below if "://" not in run_dir and below.is_relative_to(home) else home / run_dir.rsplit("/", 1)[-1]


def note_url(home: Path, run_dir: str) -> None:
    """Notes in the launches' folder where the run itself is, if that is a URL."""
    if "://" in run_dir:
        (home / "launch").mkdir(parents=True, exist_ok=True)
        (home / "launch" / "url.txt").write_text(run_dir, encoding="utf-8")


def read_url(home: Path) -> str | None:
    """Returns the URL of a run in an object store, None for any other."""
    path = home / "launch" / "url.txt"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def add_job(home: Path, job: Job) -> None:
    append_line(home / "launch" / "jobs.jsonl", dataclasses.asdict(job))


def read_jobs(home: Path) -> list[Job]:
    """Returns all submissions, oldest first."""
    return [Job(**line) for line in read_json_lines(home / "launch" / "jobs.jsonl")]


def append_line(path: Path, values: dict[str, Any]) -> None:
    """Adds a line of JSON to a file; makes file and folder where they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


# -- code, revision and packages of a launch ---------------------------------------------------------------------------


ROOMS = ("kernels", "model", "data", "train", "use", "launch")


def new_launch_id(home: Path) -> str:
    """Makes a name for the next launch that sorts by time: 20261122-093000, with -2 and so on if that is taken."""
    return first_free(home / "launch" / time.strftime("%Y%m%d-%H%M%S")).name


def take_snapshot(folder: Path) -> None:
    """Fills a new folder with code, revision and packages. Raises FileExistsError if the folder is there already."""
    folder.mkdir(parents=True)
    copy_code(folder / "code")
    revision, changes = describe_revision()
    (folder / "revision.txt").write_text(revision + "\n", encoding="utf-8")
    if changes:
        (folder / "diff.patch").write_bytes(changes)
    packages = {f"{package.metadata['Name']}=={package.version}" for package in importlib.metadata.distributions()}
    lines = [f"# Python {sys.version.split()[0]} at {sys.executable}", *sorted(packages, key=str.lower)]
    (folder / "packages.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def copy_code(target: Path) -> None:
    """Copies the package's sources, wherever they lie, to target/matmix/<room>."""
    left_out = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    for room in ROOMS:
        spec = importlib.util.find_spec(f"matmix.{room}")  # imports nothing of it
        assert spec is not None, f"matmix.{room} cannot be found"
        shutil.copytree(Path(spec.origin).parent, target / "matmix" / room, ignore=left_out)
    # Without it, Python would prefer an installed package, wherever that is on the path, to the copy.
    shutil.copy(Path(spec.origin).parents[1] / "__init__.py", target / "matmix")


def describe_revision() -> tuple[str, bytes]:
    """Returns ("matmix 0.1.0, git 1a2b... with changes", the changes as a patch); no git, no revision and no patch."""
    installed = importlib.metadata.distributions(name="matmix")
    version = f"matmix {next((package.version for package in installed), 'of unknown version')}"
    head = git("rev-parse", "HEAD")
    if head is None:
        return f"{version}, not from a git working copy", b""
    changes = git("diff", "--binary", "HEAD") or b""
    new = (git("ls-files", "--others", "--exclude-standard", *ROOMS) or b"").decode().split()
    words = f"{version}, git {head.decode().strip()}" + (" with changes (diff.patch)" if changes else "")
    if new:
        words += f"\nfiles that git does not know (in code/): {', '.join(new)}"
    return words, changes
