"""Where a run stands, and what a call of `train` came to."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class TrainState:
    """Where a run stands. Everything else that a checkpoint holds belongs to the engine or the loader."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    damaged: int = 0
    rewinds: int = 0
    restores: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a call of `train` did."""

    step: int
    steps_done: int  # by this call; 0 if the run had already finished
    finished: bool
    stopped: bool  # whether a signal to any rank asked it to end
    signal: int  # the signal that this rank received, or 0
    saved: bool  # whether the last step is in a checkpoint
    metrics: dict[str, float]  # of the last evaluation
    unigram_entropy: float  # of the training split, nats per token
