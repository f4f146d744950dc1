"""The records of a run, as metrics.jsonl and trackers of experiments have them."""

from __future__ import annotations

from typing import Any

from matmix.train.callbacks.base import Callback, Rewind, RunView, StepRecord


class Recorder(Callback):
    """Gets every record of a run in one form."""

    def take(self, run: RunView, record: dict[str, Any]) -> None:
        """record: "kind" (train, validation, rewind or restore), "step", and the numbers by their names, in the units
        of metrics.jsonl."""
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
