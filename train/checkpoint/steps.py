"""Names of checkpoints, step-00001000, and which of them a folder holds. (Standard library only, for launchers.)"""

import os
import re
import shutil
from pathlib import Path

MANIFEST = "checkpoint.json"
"""The file of a checkpoint that is written last."""
LEFTOVERS = (".tmp-", ".old-")
"""Directories whose names begin so are unfinished or already given up: no reader looks at them."""
_NAME = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder, None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def list_steps(folder: Path, *, written: bool = False) -> list[int]:
    """Steps of the checkpoints in a folder, in order; written: of those alone that have their manifest."""
    names = os.listdir(folder) if folder.is_dir() else []
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    return sorted(step for name, step in steps.items() if not written or (folder / name / MANIFEST).is_file())


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint: its manifest goes first, so that half of one is never taken for a whole."""
    (path / MANIFEST).unlink(missing_ok=True)
    aside = path.with_name(f"{LEFTOVERS[1]}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(path.rename(aside))
