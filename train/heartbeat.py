"""When this process last made progress, and at what: written by whoever does the work, read by the watchdog."""

from __future__ import annotations

import dataclasses
import time


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """One sign of life."""

    seconds: float  # of the monotonic clock
    what: str  # as in "the last sign of life was ..."


_last = Beat(time.monotonic(), "its start")


def beat(what: str) -> None:
    """Says that something was done. Cheap enough for every batch and every file; from any thread."""
    global _last
    _last = Beat(time.monotonic(), what)


def last_beat() -> Beat:
    return _last
