"""Sends a run back to a checkpoint without a new start, when a guard decides so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from matmix.data.loading.loader import Loader
from matmix.train.callbacks.base import Rewind, RunView

logger = logging.getLogger(__name__)

Words = Callable[[int, int, int], str]


class RewindableRun(RunView, Protocol):
    """A run that can be put back to one of its checkpoints."""

    loader: Loader

    def newest_checkpoint(self) -> Path | None:
        """The newest valid one. On all ranks, with the same result."""
        ...

    def load(self, newest: Path, *, lost_to: str) -> Any:
        """Puts everything where a checkpoint has it. On all ranks."""
        ...

    def went_back(self, rewind: Rewind) -> None:
        """Tells the callbacks, and begins a new interval of the records."""
        ...


def go_back(
    run: RewindableRun, batches: Iterator[Any], checkpoint: Path, kind: Literal["rewind", "restore"], words: Words
) -> Iterator[Any]:
    """Puts the run back to a checkpoint and returns the batches from there: a restore reads the same data again, a
    rewind goes on with the data after what was read.

    words: makes what the run says of it from the number of this rewind or restore, and from the first and the last of
    the samples that a rewind leaves out.
    """
    state, read = run.state, run.loader.samples
    batches.close()
    run.load(checkpoint, lost_to="rewinds")
    first = run.loader.samples
    if kind == "rewind":
        run.loader.samples, run.state.rewinds = read, state.rewinds + 1
        count = run.state.rewinds
    else:
        run.state.restores = count = state.restores + 1
    logger.log(logging.WARNING if kind == "restore" else logging.INFO, words(count, first, read - 1))
    run.went_back(Rewind(state.step, kind))
    return iter(run.loader)
