"""The base class of the kinds of examples: a numbered sequence of them, each tokenised when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from matmix.data.config import ExamplesConfig
from matmix.data.examples.encoding import Document, Encoder
from matmix.data.examples.labels import Classes
from matmix.data.examples.readers import read_rows
from matmix.data.labels import IGNORED


@dataclass(frozen=True, slots=True)
class Example:
    """What the model reads of one example, and what it is to predict."""

    documents: tuple[Document, ...]
    labels: np.ndarray
    """(n, ...), int64 with -100 or float32 with NaN where there is nothing to predict."""
    positions: np.ndarray | None = None
    """int64 (n,): positions of its only document whose outputs count; None = an output for each document."""


class Examples:
    """The examples of a split. A subclass reads one kind of them; tasks name it."""

    needed: ClassVar[tuple[str, ...]] = ("text",)
    """What the files must have, besides labels in the training and validation split."""
    optional: ClassVar[tuple[str, ...]] = ()
    labelled: ClassVar[bool] = True
    """Whether examples to train on have a label."""
    by_position: ClassVar[bool] = False
    """Whether the model gives outputs for positions, not for documents."""
    documents: int = 1
    """Of each example."""
    outputs: int | None = None
    """What the model predicts for each document or position; None = not said by the data."""
    classes: Classes = Classes(())

    def __init__(self, config: ExamplesConfig, encoder: Encoder, split: str) -> None:
        """Raises FileNotFoundError or ValueError (one line) for files that cannot be used."""
        self.config, self.encoder, self.split = config, encoder, split
        needed, optional = self.needed, self.optional
        if self.labelled and split != "test":
            needed = (*needed, "label")
        else:
            optional = (*optional, "label")
        self.rows = read_rows(config.path(split), config, needed, optional)

    @cached_property
    def training_labels(self) -> list[Any]:
        """The label column of the training examples. Raises ValueError (one line) where none are named."""
        if not self.config.train:
            raise ValueError(
                "the classes have no names: set data.examples.labels to them (--labels of matmix evaluate), or "
                "data.examples.train to the examples to train on"
            )
        needed = (*self.needed, "label")
        return list(read_rows(self.config.path("train"), self.config, needed, self.optional).columns["label"])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Example:
        raise NotImplementedError

    def cell(self, name: str, number: int) -> Any:
        """What the row has in a column, or None."""
        return self.rows.columns[name][number] if name in self.rows.columns else None

    @property
    def nothing(self) -> np.ndarray:
        """The labels of an example that there is not."""
        return np.full(1, IGNORED, np.int64)

    @property
    def facts(self) -> dict[str, Any]:
        """What a saved position in the data belongs to: JSON values."""
        return {"examples": self.rows.digest, "classes": list(self.classes.names)}
