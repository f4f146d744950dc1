"""Learning-rate schedules: the share of the peak rate at a step, a pure function so that resuming needs no state."""

from __future__ import annotations

import math

from matmix.train.optim.config import ScheduleConfig


def _length(value: float, steps: int) -> float:
    return value * steps if value < 1 else value


def rate_share(step: int, steps: int, config: ScheduleConfig) -> float:
    """Share of the peak learning rate used by optimizer step `step` (1-based) of `steps`."""
    warmup = min(_length(config.warmup, steps), steps)
    if step < warmup:
        return config.start + (1 - config.start) * (step / warmup)
    if config.name == "constant" or steps <= warmup:
        return 1.0
    if config.name == "wsd":
        start = max(steps - _length(config.decay, steps), warmup)
        progress = max(0.0, (step - start) / max(steps - start, 1e-9))
    else:
        progress = (step - warmup) / (steps - warmup)
    progress = min(progress, 1.0)
    if config.name == "cosine":
        return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (1 - config.final) * progress
