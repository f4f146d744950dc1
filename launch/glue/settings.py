"""Published settings other than those of the recipes.

The recipes have those of Hydra (arXiv 2407.09941). "bert" are those published beside them for BERT, trained as
MosaicBERT was. "lion" are Hydra's with the learning rate 1e-5 on every task (arXiv 2502.16249).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

Column = Literal["hydra", "bert", "lion"]


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What differs between tasks."""

    lr: float
    weight_decay: float
    epochs: int
    batch: int


BERT = {
    "MNLI": Settings(5e-5, 5e-6, 3, 48),
    "RTE": Settings(1e-5, 1e-5, 3, 16),
    "QQP": Settings(3e-5, 3e-6, 5, 16),
    "QNLI": Settings(1e-5, 1e-6, 10, 16),
    "SST-2": Settings(3e-5, 3e-6, 3, 16),
    "STS-B": Settings(3e-5, 3e-6, 10, 32),
    "MRPC": Settings(8e-5, 8e-6, 10, 32),
    "CoLA": Settings(5e-5, 5e-6, 10, 32),
}
LION_LR = 1e-5


def overrides(column: Column, task: str, given: Sequence[str] = ()) -> list[str]:
    """Options for the recipe of a task, where the recipe does not have them, and after them those that are `given`."""
    if column == "hydra":
        return [*given]
    if column == "lion":
        return ["--optimizer.lr", repr(LION_LR), *given]
    own = BERT[task]
    rates = ["--optimizer.lr", repr(own.lr), "--optimizer.weight-decay", repr(own.weight_decay)]
    by_steps = any(word.partition("=")[0] == "--steps" for word in given)
    epochs = [] if by_steps else ["--epochs", str(own.epochs)]
    return [*rates, *epochs, "--global-batch-size", str(own.batch), *given]
