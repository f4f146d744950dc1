"""Small files that are there whole or not at all, also after a power cut. (Standard library only, for launchers.)"""

from __future__ import annotations

import os
from pathlib import Path


def set_aside(path: Path) -> Path:
    """Renames a file to NAME.aside-1, or the first such number that is free, and returns the new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes text (UTF-8) or bytes under a temporary name beside `path`, brings it to the disk, and renames."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
