"""Stops a run whose gradients have become NaN or infinite for good, and says in which layer that began; warns of
validation losses that are no numbers."""

from __future__ import annotations

import logging
import math

from matmix.train.callbacks.base import RunView
from matmix.train.errors import NonFiniteError

logger = logging.getLogger(__name__)

_ADVICE = "try a lower optimizer.lr, a longer schedule.warmup or engine.precision = fp32"


class NanGuard:
    """Counts skipped steps (the engine has left weights and moments unchanged) and gives up after `limit` in a row."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def after_step(self, run: RunView) -> None:
        """Raises NonFiniteError where the step just done was one too many."""
        if run.step_was_finite:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        step, (where, advice) = run.state.step, find_overflow(run)
        logger.info(
            f"step {step}: {f'{where}; ' if where else ''}"
            f"loss {run.last_loss:.4g}, gradient norm {run.last_norm:.4g}: "
            f"step skipped, weights unchanged ({self.in_a_row} in a row, the run stops at {self.limit})"
            f"{f'; {advice}' if where else ''}"
        )
        if self.in_a_row >= self.limit:
            saved = max(run.saved_steps(), default=None)
            newest = "there is no checkpoint" if saved is None else f"the newest checkpoint is that of step {saved}"
            raise NonFiniteError(
                f"{self.limit} steps in a row had a NaN or infinite loss or gradient (last: step {step}"
                f"{f', where {where}' if where else ''}); {newest}; {advice}"
            )

    def after_evaluation(self, run: RunView, metrics: dict[str, float]) -> None:
        """Tells of a loss that is no number."""
        if math.isfinite(metrics.get("loss", 0.0)):
            return
        mixers = (block.mixer for block in run.engine.module.blocks if block.mixer is not None)
        advice = next(filter(None, (mixer.overflow_advice() for mixer in mixers)), _ADVICE)
        logger.warning(
            f"the validation loss of step {run.state.step} is {metrics['loss']}: on some of that text the "
            f"model leaves the range of floats; {advice}"
        )


def find_overflow(run: RunView) -> tuple[str, str]:
    """Which layer's states were the first, from the bottom, to grow out of the range of floats in the last step ("" if
    none did, or none is watched), and what to do."""
    for name, value in run.monitored.items():  # in the order of the layers
        _, index, short = name.split(".", 2)  # blocks.<index>.<name of the value>
        mixer = run.engine.module.blocks[int(index)].mixer
        # Minus infinity is the logarithm of states of zeros.
        if math.isnan(value) or value >= mixer.monitor_limits.get(short, math.inf):
            break
    else:
        return "", _ADVICE
    kind, _ = run.config.model.layer_kinds()[int(index)]
    construction = getattr(mixer.config, "construction", None)
    kind = f"{kind}, construction {construction}" if construction else kind
    happened = "left the range of float32"
    if math.isfinite(value):
        happened = f"grew to a log-norm of {value:.3g}, where their squares leave the range of float32"
    return f"the states of layer {index} ({kind}) {happened}", mixer.overflow_advice() or _ADVICE
