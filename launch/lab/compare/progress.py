"""How far the runs of a comparison are, in plain lines, and how long the rest will take."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matmix.train.words import duration

EVERY_SECONDS = 60.0
_TAIL_BYTES = 8192


class Clock:
    """Guesses how long the rest will take: as long as the runs so far, on average."""

    def __init__(self, parallel: int) -> None:
        self.parallel, self.total, self.runs = parallel, 0.0, 0

    def count(self, seconds: float) -> None:
        self.total += seconds
        self.runs += 1

    def left(self, running: Sequence[float], waiting: int) -> str:
        mean = self.total / self.runs
        seconds = sum(max(0.0, mean - spent) for spent in running) + waiting * mean
        return duration(seconds / min(self.parallel, max(1, len(running) + waiting)))


def run_words(run: Path, last_step: int) -> str:
    """Step, loss and time left of a run that is going on, from the last record in its metrics.jsonl."""
    record = last_record(run / "metrics.jsonl")
    if record is None:
        return "no step recorded yet"
    left = duration((last_step - record["step"]) * record["seconds_per_step"])
    return f"step {record['step']:,} of {last_step:,}, loss {record['loss']:.4f}, about {left} left"


def last_record(path: Path) -> dict[str, Any] | None:
    """The last record of training steps; only the end of the file is read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:  # cut by where the reading began, or not written to its end yet
            continue
        if isinstance(record, dict) and record.get("kind") == "train":
            return record
    return None
