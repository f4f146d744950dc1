"""RUN/launch/<launch id>/: all that one start of a run depends on, so that a job requeued weeks later runs the same.

config.toml    the resolved config, itself a recipe
code/matmix/   the package's sources; the job's PYTHONPATH begins with code/
revision.txt   version and git revision; diff.patch beside it where the working copy had changes
packages.txt   what was installed
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from matmix.data.storage.files import first_free
from matmix.train.run.revision import git

ROOMS = ("kernels", "model", "data", "train", "use", "launch")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def new_launch_id(home: Path) -> str:
    """A name for the next launch that sorts by time: 20261122-093000, with -2 and so on if that is taken."""
    return first_free(home / "launch" / time.strftime("%Y%m%d-%H%M%S")).name


def take_snapshot(folder: Path) -> None:
    """Fills a new folder with code, revision and packages. Raises FileExistsError if the folder is there already."""
    folder.mkdir(parents=True)
    copy_code(folder / "code")
    revision, changes = describe_revision()
    (folder / "revision.txt").write_text(revision + "\n", encoding="utf-8")
    if changes:
        (folder / "diff.patch").write_bytes(changes)
    (folder / "packages.txt").write_text("".join(f"{line}\n" for line in installed_packages()), encoding="utf-8")


def copy_code(target: Path) -> None:
    """The package's sources as target/matmix/<room>, to be used with target on PYTHONPATH; from wherever the package
    lies: a checkout, site-packages, or an earlier snapshot."""
    for room in ROOMS:
        spec = importlib.util.find_spec(f"matmix.{room}")  # imports nothing of it
        assert spec is not None, f"matmix.{room} cannot be found"
        shutil.copytree(Path(spec.origin).parent, target / "matmix" / room, ignore=_LEFT_OUT)
    # Without it, Python would prefer an installed package, wherever that is on the path, to the copy.
    shutil.copy(Path(spec.origin).parents[1] / "__init__.py", target / "matmix")


def describe_revision() -> tuple[str, bytes]:
    """("matmix 0.1.0, git 1a2b... with changes", the changes as a patch); no git, no revision and no patch."""
    installed = importlib.metadata.distributions(name="matmix")
    version = f"matmix {next((found.version for found in installed), 'of unknown version')}"
    head = git("rev-parse", "HEAD")
    if head is None:
        return f"{version}, not from a git working copy", b""
    changes = git("diff", "--binary", "HEAD") or b""
    new = (git("ls-files", "--others", "--exclude-standard", *ROOMS) or b"").decode().split()
    words = f"{version}, git {head.decode().strip()}" + (" with changes (diff.patch)" if changes else "")
    if new:
        words += f"\nfiles that git does not know (in code/): {', '.join(new)}"
    return words, changes


def installed_packages() -> Sequence[str]:
    """name==version of everything installed, sorted, and the Python that runs it."""
    found = {f"{package.metadata['Name']}=={package.version}" for package in importlib.metadata.distributions()}
    return [f"# Python {sys.version.split()[0]} at {sys.executable}", *sorted(found, key=str.lower)]
