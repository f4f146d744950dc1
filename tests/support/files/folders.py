"""Files of folders as tests compare and harm them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def contents(folder: Path | str) -> dict[str, bytes]:
    """Path below a folder -> content, of all files."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def flip_a_bit(path: Path) -> None:
    """Changes the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class Interruption(BaseException):
    """The end of a process."""


def interrupt_at(monkeypatch, number: int) -> Callable[[], int]:
    """Lets the `number`-th rename of a file fail; returns a function that says how many there were."""
    replace, calls = os.replace, 0

    def failing(source, target):
        nonlocal calls
        calls += 1
        if calls == number:
            raise Interruption(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    return lambda: calls
