"""metrics.jsonl: one JSON object per record, in the run directory."""

from __future__ import annotations

import json
import os
from typing import Any

from matmix.train.callbacks.base import Callback, StepRecord


class MetricsFile(Callback):
    """Appends records. Those of what a resumed run does again are dropped first, so that none appears twice."""

    records = True

    def on_start(self, trainer) -> None:
        self.path = trainer.run.path / "metrics.jsonl"
        self._drop_what_comes_again(trainer)

    def on_rewind(self, trainer, step: int, kind: str) -> None:
        self._drop_what_comes_again(trainer)
        state = trainer.state
        told = {"spike": step, "rewinds": state.rewinds}
        if kind == "restore":
            told = {"difference": step, "restores": state.restores}
        self._append({"kind": kind, "step": state.step, **told})

    def _drop_what_comes_again(self, trainer) -> None:
        if not self.path.exists():
            return
        kept = []
        step, evaluated = trainer.state.step, trainer.metrics.get("step") == trainer.state.step
        rewinds, restores = trainer.state.rewinds, trainer.state.restores
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                happened = {"train": True, "validation": evaluated}
                happened["rewind"] = record.get("rewinds", 0) <= rewinds
                happened["restore"] = record.get("restores", 0) <= restores
                if record["step"] < step or (record["step"] == step and happened[record["kind"]]):
                    kept.append(line)
            except (ValueError, KeyError):
                continue  # the last line of a process that was killed while writing it
        temporary = self.path.with_name(".metrics.jsonl.tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def on_record(self, trainer, record: StepRecord) -> None:
        self._append({"kind": "train", **record.numbers()})

    def on_evaluation(self, trainer, metrics: dict[str, float]) -> None:
        self._append({"kind": "validation", "step": trainer.state.step, **metrics})

    def _append(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
