"""The counters of a run, which its checkpoints hold, and the result of a call of `train`."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

Weights = Literal["raw", "ema"]
"""Which weights of a checkpoint: those that were trained, or their average."""


@dataclasses.dataclass(slots=True)
class TrainState:
    """The counters of a run. Everything else that a checkpoint holds belongs to the engine or the loader."""

    step: int = 0
    tokens: int = 0  # seen; of images as many (`Task.unit`)
    skipped: int = 0
    damaged: int = 0
    rewinds: int = 0
    restores: int = 0


def check_extra(extra: dict[str, Any], checkpoint: Path) -> None:
    """Raises ValueError (one line) unless a checkpoint holds what the training loop saves, as far as its form goes."""
    numbers, known = extra.get("train_state"), {field.name for field in dataclasses.fields(TrainState)}
    sound = (
        isinstance(numbers, dict)
        and numbers.keys() <= known
        and all(type(value) is int and value >= 0 for value in numbers.values())
        and checkpoint.name.endswith(f"-{numbers.get('step', -1):08d}")
        and all(isinstance(extra.get(name), dict) for name in ("data", "config", "parameter_rules"))
        and all(isinstance(extra.get(name), dict | None) for name in ("evaluation", "goodput", "best"))
        and all(isinstance(loss, int | float) for loss in extra.get("spikes") or [])
    )
    if not sound:
        raise ValueError(f"checkpoint {checkpoint} is damaged: it does not say where the training stood")


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of a call of `train`."""

    step: int
    steps: int  # of the whole run
    steps_done: int  # by this call; 0 if the run had already finished
    finished: bool
    stopped: bool  # whether a signal to any rank asked it to end
    signal: int  # the signal that this rank received, or 0
    saved: bool  # whether the last step is in a checkpoint
    metrics: dict[str, float]  # of the last evaluation
    unigram_entropy: float | None  # of the training split, nats per token; None where there are no tokens
