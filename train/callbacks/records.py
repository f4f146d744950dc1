"""The records of a run: metrics.jsonl, the form in which trackers get them, and curves.png, the picture of them."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import statistics
from typing import Any, NamedTuple

from matmix.data.artifacts import parse_json, read_json_lines
from matmix.data.storage.files import set_aside, write_atomic
from matmix.train.callbacks.base import Callback, Rewind, RunView, StepRecord
from matmix.train.evaluators.base import PREFIX as EMA
from matmix.train.evaluators.base import TITLE
from matmix.train.evaluators.context import PREFIX

logger = logging.getLogger(__name__)

_MOST_WAITING = 100_000  # records kept in memory while they cannot be written; some 50 MB
_SMOOTH = 0.05  # share of the records over which the training loss of the picture is averaged


class Recorder(Callback):
    """A callback that gets every record of a run in one form."""

    def take(self, run: RunView, record: dict[str, Any]) -> None:
        """record: "kind" (train, validation, rewind or restore), "step", and the numbers as metrics.jsonl has them."""
        raise NotImplementedError

    def on_record(self, run: RunView, record: StepRecord) -> None:
        self.take(run, {"kind": "train", **record.numbers()})

    def on_evaluation(self, run: RunView, metrics: dict[str, float]) -> None:
        self.take(run, {"kind": "validation", "step": run.state.step, **metrics})

    def on_rewind(self, run: RunView, rewind: Rewind) -> None:
        told = {"spike": rewind.step, "rewinds": run.state.rewinds}
        if rewind.kind == "restore":
            told = {"difference": rewind.step, "restores": run.state.restores}
        self.take(run, {"kind": rewind.kind, "step": run.state.step, **told})


class MetricsFile(Recorder):
    """Appends records to metrics.jsonl, one JSON object a line, in which NaN and infinity are null, without those of
    steps that a resumed run does again. A damaged file is moved aside; what a full disk refuses is written later."""

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
        unknown = {key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
        self._waiting.append(json.dumps({**record, **dict.fromkeys(unknown)}) + "\n")
        del self._waiting[:-_MOST_WAITING]
        self._write(run)

    def on_end(self, run: RunView) -> None:
        if self._waiting:
            self._write(run)

    def _write(self, run: RunView) -> None:
        """Drops the records of steps that are done again and appends the new ones, all or nothing. Raises OSError."""
        self.path = run.path / "metrics.jsonl"
        if self._stale is not None:
            self._drop_what_comes_again(self._stale)
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

    def _drop_what_comes_again(self, stand: _Stand) -> None:
        if not self.path.exists():
            return
        raw = self.path.read_bytes()
        kept, damaged = [], 0
        for number, line in enumerate(lines := raw.splitlines(), start=1):
            try:
                if stand.includes(parse_json(line, self.path)):
                    kept.append(line + b"\n")
            except (ValueError, LookupError, TypeError, AttributeError):
                if number < len(lines) or raw.endswith(b"\n"):  # else a kill has cut it off
                    damaged = damaged or number
        if damaged:
            logger.warning(
                f"{self.path.name} is damaged in line {damaged} and moved to {set_aside(self.path).name}; "
                f"what can be read of it is kept (the run does not need it)"
            )
        write_atomic(self.path, b"".join(kept))


class _Stand(NamedTuple):
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
        """Returns whether a record is of a step done before this position. Raises for a line that is no record."""
        happened = {"train": True, "validation": self.evaluated}
        happened["rewind"] = record.get("rewinds", 0) <= self.rewinds
        happened["restore"] = record.get("restores", 0) <= self.restores
        return record["step"] < self.step or (record["step"] == self.step and happened[record["kind"]])


class Curves(Callback):
    """Draws curves.png once, after the last step. matplotlib is loaded only then."""

    def __init__(self) -> None:
        self.evaluated = False

    def on_evaluation(self, run: RunView, metrics: dict[str, float]) -> None:
        self.evaluated = True

    def on_end(self, run: RunView) -> None:
        # A run that failed or was told to stop is not drawn, nor one that is drawn already.
        ended = run.state.step == run.config.last_step and not run.stop_agreed
        picture = run.path / "curves.png"
        if ended and (self.evaluated or not picture.exists()):
            write_atomic(picture, draw(read_json_lines(run.path / "metrics.jsonl")))


def draw(records: list[dict[str, Any]]) -> bytes:
    """Returns a PNG of the records of a run: losses over the steps and, where it was measured, over the position."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    evaluations = [record for record in records if record["kind"] == "validation"]
    measured = [record for record in evaluations if position_losses(record)]
    figure = Figure(figsize=(12 if measured else 7, 4.5), layout="constrained", dpi=110)
    left, *rest = figure.subplots(1, 2 if measured else 1, squeeze=False)[0]

    def curve(those: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
        # Null where every step was skipped, or a loss left the range of floats.
        points = [(record["step"], record[name]) for record in those if record.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    steps, losses = curve([record for record in records if record["kind"] == "train"], "loss")
    window = max(1, round(_SMOOTH * len(losses)))
    means = [statistics.fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]
    left.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    left.plot(steps, means, color="tab:blue", label="training, running mean")
    left.plot(*curve(evaluations, "loss"), "o-", color="tab:red", markersize=5, label="validation")
    steps, averaged = curve(evaluations, EMA + "loss")
    if averaged:
        left.plot(steps, averaged, "s--", color="tab:green", markersize=4, label=f"validation, {TITLE}")
    left.set_xlabel("step")
    left.set_ylabel("loss (nats per target)")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in rest:
        shown = [measured[0], measured[-1]] if len(measured) > 1 else measured
        ticks = {}
        for record, look in zip(shown, ("o--", "o-")[-len(shown) :], strict=True):
            label = f"step {record['step']}"
            if "context_gain" in record:
                label += f": context gain {record['context_gain']:.2f}"
            if "mixing_gain" in record:
                label += f", without mixing {record['mixing_gain']:+.2f}"
            # By the beginnings of the bins, which then stand at equal distances.
            bins = {begin.bit_length() - 1: (name, loss) for begin, name, loss in position_losses(record)}
            axes.plot(list(bins), [loss for _, loss in bins.values()], look, label=label)
            ticks |= {place: name for place, (name, _) in bins.items()}
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_xlabel("tokens of the document up to the predicting one")
        axes.set_ylabel("validation loss (nats per target)")
    for axes in (left, *rest):
        axes.grid(True, alpha=0.3, linewidth=0.6)
        axes.legend(fontsize=9)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def position_losses(record: dict[str, Any]) -> list[tuple[int, str, float]]:
    """Returns (first position, name of its bin, loss) of each bin of an evaluation."""
    names = [name.removeprefix(PREFIX) for name in record if name.startswith(PREFIX)]
    bins = [(int(name.partition("-")[0]), name, record[PREFIX + name]) for name in names]
    return [entry for entry in bins if entry[2] is not None]
