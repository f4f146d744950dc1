"""One of the runs that are trained side by side: whether it is finished, or lies there with other settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matmix.data.artifacts import read_json_lines
from matmix.train.config import RunConfig
from matmix.train.guards.best import is_out_of_patience
from matmix.train.loaders import make_loader
from matmix.train.recipe import config_to_dict, differences
from matmix.train.run.directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run."""

    entry: str
    """What is trained: in a comparison the entry's title, its name and, with variants, that of the variant."""
    seed: int
    config: RunConfig
    """With the seed and the run directory."""

    @property
    def title(self) -> str:
        return f"{self.entry}, seed {self.seed}"

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.config.run_dir)

    @property
    def log(self) -> Path:
        return self.run.path / "train.log"

    @property
    def last_step(self) -> int | None:
        """The last step; None where `epochs` stand in its place and the run has not begun, which counts their steps."""
        if self.config.stop_step or not self.config.epochs:
            return self.config.last_step
        try:
            begun = self.run.read_config()
        except (FileNotFoundError, ValueError):
            return None
        return begun.steps if begun.epochs == self.config.epochs else None

    def is_finished(self) -> bool:
        """Returns True where it has been trained to its last step, or to where `evaluation.patience` ended it, and
        evaluated."""
        summary = self.run.read_summary()
        if summary is None:
            return False
        return summary["step"] == self.last_step or is_out_of_patience(self.config.evaluation, summary.get("best"))


def check_data(tasks: Sequence[PlannedRun]) -> None:
    """Raises FileNotFoundError (one line) where no run that is not finished has its data: each would fail by itself."""
    missing = []
    for config in {repr(task.config.data): task.config for task in tasks if not task.is_finished()}.values():
        try:
            make_loader(config, "train", 0, 1).close()
        except FileNotFoundError as error:
            missing.append(error)
        else:
            return
    if missing:
        raise missing[0]


# How a run is watched, saved and spread over devices, and where and how its data are read: its loss does not depend on
# these.
_MAY_DIFFER = (
    *("run_dir", "device", "stop_step", "micro_batch_size", "max_bad_steps", "gc_every"),
    *("logging.", "checkpoint.", "faults.", "engine."),
    *("data.path", "data.validation_path", "data.workers", "data.worker_start", "data.prefetch", "data.verify"),
    *("data.cache_dir", "data.cache_gigabytes", "data.images.path", "data.images.validation_path"),
    "evaluation.ablation_batches",
)
_MAY_NOT_DIFFER = ("engine.precision",)


def matters(key: str) -> bool:
    """Returns True where two runs that differ in this key of their configs are trained differently."""
    return key in _MAY_NOT_DIFFER or not any(
        key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for allowed in _MAY_DIFFER
    )


def other_settings(task: PlannedRun) -> str:
    """In which settings the run that lies there differs from the task's; "" if it does not, or has not begun."""
    run = task.run
    if not run.config_path.is_file():
        return ""
    try:
        found = run.read_config()
    except ValueError as error:
        return str(error)
    wanted = task.config
    if wanted.epochs and wanted.epochs == found.epochs:  # the run has counted their steps
        wanted = dataclasses.replace(wanted, steps=found.steps)
    different = differences(config_to_dict(found), wanted)
    texts = [f"{key}: {old!r} there, {new!r} here" for key, old, new in different if matters(key)]
    for change in _changes(task):
        if matters(change["key"]) and change["step"] and f"{change['key']}: " not in " ".join(texts):
            texts.append(f"{change['key']}: {change['old']!r} until step {change['step']}, then {change['new']!r}")
    return "; ".join(texts)


def check_directories(tasks: Sequence[PlannedRun], advice: str = "", *, option: str = "--run-dir") -> None:
    """Raises ValueError (one line), before anything is trained, where a folder holds a run with other settings or
    something that is not a run; advice: what else can be done about other settings. option: names another folder."""
    for task in tasks:
        if others := other_settings(task):
            raise ValueError(
                f"{task.title}: {task.run.where} was trained with other settings ({others}), and runs of a table are "
                f"trained alike; give these, or another {option}{advice}"
            )
        try:
            task.run.check(task.config)
        except ValueError as error:
            raise ValueError(f"{task.title}: {error}") from None


def _changes(task: PlannedRun) -> list[dict[str, Any]]:
    """Returns what was changed on the way (changes.jsonl of the run)."""
    return [change for change in read_json_lines(task.run.path / "changes.jsonl") if {"key", "step"} <= change.keys()]
