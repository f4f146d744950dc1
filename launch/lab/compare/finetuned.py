"""What the encoders of a comparison are worth to others: each finished run is fine-tuned on tasks. What all kinds of
tasks have in common.

COMPARISON/finetune/<name>/   all of one kind of fine-tuning
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from matmix.launch.lab.compare.config import FINETUNED
from matmix.launch.many.settings import matters
from matmix.launch.many.task import Task
from matmix.train.config import RunConfig
from matmix.train.recipe import config_to_dict, differences
from matmix.train.run.directory import RunDirectory

Scores = dict[str, list[float]]
"""Metric of a pretrained run -> its values over the fine-tunings of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoreColumn:
    """A column of the table."""

    key: str
    """What the number is called among the metrics of a pretrained run."""
    heading: str
    task: str = ""
    """The task that a run without the number has not been fine-tuned on; "" where it follows from others."""
    digits: int = 1
    scale: float = 100
    runs: int = 1
    """Fine-tunings of each pretrained run."""


class Finetuned(ABC):
    """What the runs of a comparison are fine-tuned on."""

    name: str
    """That of its folder."""
    home: Path
    """The folder of the comparison."""

    @property
    def folder(self) -> Path:
        return self.home / FINETUNED / self.name

    def folder_of(self, pretrained: Task) -> Path:
        """Where a run of the comparison is fine-tuned."""
        return self.folder / pretrained.run.path.relative_to(self.home)

    @property
    @abstractmethod
    def columns(self) -> list[ScoreColumn]:
        """Of the table."""

    @abstractmethod
    def words(self, pretrained: Sequence[Task]) -> list[str]:
        """Lines below the table: what its numbers are."""

    @abstractmethod
    def plan_words(self) -> str:
        """The tasks, in a plan."""

    @property
    @abstractmethod
    def runs_of_each(self) -> int:
        """How many fine-tunings a pretrained run has."""

    @abstractmethod
    def keep(self) -> None:
        """Writes down into its folder what is fine-tuned, and how."""

    @abstractmethod
    def scores(self, pretrained: Task) -> Scores:
        """All metrics of the finished fine-tunings of a run."""


def as_begun(config: RunConfig) -> RunConfig:
    """`config` with what the run of a comparison which was moved began with, read when it began and never again."""
    run = RunDirectory(config.run_dir)
    if not run.config_path.is_file():
        return config
    begun = run.read_config()
    examples = dataclasses.replace(config.data.examples, tokenizer=begun.data.examples.tokenizer)
    data = dataclasses.replace(config.data, examples=examples)
    return dataclasses.replace(config, init=dataclasses.replace(config.init, from_=begun.init.from_), data=data)


def check_alike(before: RunConfig, now: RunConfig, name: str, folder: Path, advice: str) -> None:
    """Raises ValueError (one line) where a task stood for other settings before; advice: what to do then."""
    texts = [
        f"{key}: {old!r} there, {new!r} here"
        for key, old, new in differences(config_to_dict(before), now)
        if matters(key)
    ]
    if texts:
        raise ValueError(
            f"--finetune {name}: {folder} was fine-tuned with other settings ({'; '.join(texts)}), and runs of a table "
            f"are trained alike; {advice}"
        )
