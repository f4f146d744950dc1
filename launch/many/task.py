"""One of the runs that are trained side by side, and whether it is finished."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from matmix.train.config import RunConfig
from matmix.train.guards.best import is_out_of_patience
from matmix.train.loaders import make_loader
from matmix.train.run.directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
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
        """Whether it has been trained to its last step, or to where `evaluation.patience` ended it, and evaluated."""
        summary = self.run.read_summary()
        if summary is None:
            return False
        return summary["step"] == self.last_step or is_out_of_patience(self.config.evaluation, summary.get("best"))


def check_data(tasks: Sequence[Task]) -> None:
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
