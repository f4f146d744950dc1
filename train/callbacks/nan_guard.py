"""Stops a run whose gradients have become NaN or infinite for good."""

from __future__ import annotations

from matmix.train.callbacks.base import Callback
from matmix.train.errors import NonFiniteError


class NanGuard(Callback):
    """Counts skipped steps (the engine has left weights and moments unchanged) and gives up after `limit` in a row."""

    main_rank_only = False

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def on_step(self, trainer) -> None:
        if trainer.step_was_finite:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        trainer.tell(
            f"step {trainer.state.step}: loss {trainer.last_loss:.4g}, gradient norm {trainer.last_norm:.4g}: "
            f"step skipped, weights unchanged ({self.in_a_row} in a row, the run stops at {self.limit})"
        )
        if self.in_a_row >= self.limit:
            raise NonFiniteError(
                f"{self.limit} steps in a row had a NaN or infinite loss or gradient (last: step "
                f"{trainer.state.step}); the newest checkpoint is from before them; try a lower optimizer.lr, a longer "
                f"schedule.warmup or engine.precision = fp32"
            )
