"""The git revision of the code that runs. (Standard library only, for launchers.)"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def git(*words: str) -> bytes | None:
    """Output of a git command where this package lies; None where git is absent or fails, and where the package belongs
    to no working copy: it is installed, or was copied into somebody else's repository."""
    if not _run("ls-files", "train"):
        return None
    return _run(*words)


@functools.cache
def git_revision() -> str:
    """Revision of the working copy that this package belongs to, "-dirty" added where it has changes; "" outside git.

    Found once: a process runs the code it began with, and git commands are much for every checkpoint.
    """
    head, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    if head is None or changes is None:
        return ""  # the package's version is all there is
    return head.decode().strip() + ("-dirty" if changes.strip() else "")


def _run(*words: str) -> bytes | None:
    try:
        run = subprocess.run(
            ["git", "-C", str(_ROOT), *words],
            capture_output=True,
            timeout=30,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout
