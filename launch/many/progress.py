"""How far runs side by side are, in plain lines, and how long the rest will take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import read_json_lines
from matmix.train.words import duration

EVERY_SECONDS = 60.0


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


def run_words(run: Path, last_step: int | None) -> str:
    """Step, loss and time left of a run that is going on, from the last record in its metrics.jsonl."""
    if not (records := training_records(run / "metrics.jsonl")) or last_step is None:
        return "no step recorded yet"
    record = records[-1]
    left = duration((last_step - record["step"]) * record["seconds_per_step"])
    loss = "all steps of the last record skipped" if record["loss"] is None else f"loss {record['loss']:.4f}"
    return f"step {record['step']:,} of {last_step:,}, {loss}, about {left} left"


def training_records(path: Path) -> list[dict[str, Any]]:
    """The records of training steps in a metrics.jsonl, in order; [] where there is none."""
    return [record for record in read_json_lines(path) if record.get("kind") == "train"]
