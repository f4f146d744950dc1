"""Records when this process last made progress and what it was doing; the watchdog reads it."""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple


class Beat(NamedTuple):
    """One sign of life."""

    seconds: float  # of the monotonic clock
    what: str  # as in "the last sign of life was ..."
    waiting: bool = False  # for the work of another rank, which has a watchdog of its own


_last = Beat(time.monotonic(), "its start")


def beat(what: str, *, waiting: bool = False) -> None:
    """Says that something was done. Cheap enough for every batch and every file; from any thread."""
    global _last
    _last = Beat(time.monotonic(), what, waiting)


@contextlib.contextmanager
def others_at_work(what: str) -> Iterator[None]:
    """For a wait of as long as another rank's work, such as an upload: that rank beats, this one cannot."""
    beat(what, waiting=True)
    try:
        yield
    finally:
        beat(what)


def last_beat() -> Beat:
    return _last
