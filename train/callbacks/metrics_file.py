"""metrics.jsonl: one JSON object per record, in the run directory. What is NaN or infinite is null in it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from typing import Any

from matmix.data.artifacts import parse_json
from matmix.data.storage.files import set_aside, write_atomic
from matmix.train.callbacks.base import Rewind, RunView
from matmix.train.callbacks.records import Recorder

logger = logging.getLogger(__name__)

_MOST_WAITING = 100_000  # records kept in memory while they cannot be written; some 50 MB


class MetricsFile(Recorder):
    """Appends records. Those of what a resumed run does again are dropped first, so that none appears twice.

    Nothing here is needed to go on with a run: a damaged file is moved aside, and what a full disk refuses is written
    once there is room.
    """

    tries_again = True

    def __init__(self) -> None:
        self._waiting: list[str] = []  # lines not written yet, in order
        self._stale: _Stand | None = None  # where the run stood when the file began to hold what comes again

    def on_start(self, run: RunView) -> None:
        self._stale = _Stand.of(run)
        self._write(run)

    def on_rewind(self, run: RunView, rewind: Rewind) -> None:
        self._stale = _Stand.of(run)
        self._waiting = [line for line in self._waiting if self._stale.includes(json.loads(line))]
        super().on_rewind(run, rewind)

    def take(self, run: RunView, record: dict[str, Any]) -> None:
        self._waiting.append(json.dumps({key: _json_number(value) for key, value in record.items()}) + "\n")
        del self._waiting[:-_MOST_WAITING]
        self._write(run)

    def on_end(self, run: RunView) -> None:
        if self._waiting:
            self._write(run)

    def _drop_what_comes_again(self, run: RunView, stand: _Stand) -> None:
        kept, damaged = self._read(stand)
        if damaged:
            logger.warning(
                f"{self.path.name} is damaged in line {damaged} and moved to {set_aside(self.path).name}; "
                f"what can be read of it is kept (the run does not need it)"
            )
        if damaged or self.path.exists():
            write_atomic(self.path, "".join(line + "\n" for line in kept))

    def _read(self, stand: _Stand) -> tuple[list[str], int]:
        """The lines that stay, and the number of the first one that is no record, or 0. A last one that is cut off is
        what a kill leaves behind."""
        raw = self.path.read_bytes() if self.path.exists() else b""
        kept, damaged = [], 0
        for number, line in enumerate(lines := raw.splitlines(), start=1):
            try:
                record = parse_json(line, self.path)
                if stand.includes(record):
                    kept.append(line.decode())
            except (ValueError, LookupError, TypeError, AttributeError):
                if number < len(lines) or raw.endswith(b"\n"):
                    damaged = damaged or number
        return kept, damaged

    def _write(self, run: RunView) -> None:
        """Drops the records of steps that are done again and appends the new ones, all or nothing. Raises OSError if it
        cannot; both are then tried again later."""
        self.path = run.path / "metrics.jsonl"
        if self._stale is not None:
            self._drop_what_comes_again(run, self._stale)
            self._stale = None
        if not self._waiting:
            return
        with self.path.open("ab", buffering=0) as file:
            end, content = file.seek(0, os.SEEK_END), "".join(self._waiting).encode()
            try:
                if file.write(content) != len(content):
                    raise OSError("the disk is full")
            except OSError:
                file.truncate(end)
                raise
        if len(self._waiting) > 1:
            logger.info(f"{len(self._waiting)} records that could not be written before are in {self.path.name} now")
        self._waiting.clear()


def _json_number(value: Any) -> Any:
    """JSON has no NaN and no infinity, and most of its readers refuse them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(frozen=True, slots=True)
class _Stand:
    """The position of a run when it begins or goes back to a checkpoint."""

    step: int
    rewinds: int
    restores: int
    evaluated: bool

    @classmethod
    def of(cls, run: RunView) -> _Stand:
        state = run.state
        return cls(state.step, state.rewinds, state.restores, run.metrics.get("step") == state.step)

    def includes(self, record: dict[str, Any]) -> bool:
        """Whether a record is of a step that was done before this position. Raises for a line that is no record."""
        happened = {"train": True, "validation": self.evaluated}
        happened["rewind"] = record.get("rewinds", 0) <= self.rewinds
        happened["restore"] = record.get("restores", 0) <= self.restores
        return record["step"] < self.step or (record["step"] == self.step and happened[record["kind"]])
