"""The loss-spike guard: a loss far above its recent median sends the run back to its newest checkpoint, and on with
other data than those it has read since.

Such spikes come from a few bad batches meeting the weights of the moment; PaLM (arXiv 2204.02311, section 5.1) found
that the same weights with other batches, and the same batches with other weights, pass. Off unless
`faults.spike_factor` is set.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Iterator
from typing import Any

from matmix.train.callbacks.base import RunView
from matmix.train.config import FaultsConfig
from matmix.train.errors import LossSpikeError
from matmix.train.guards.rewind import RewindableRun, go_back

logger = logging.getLogger(__name__)


class SpikeGuard:
    """Remembers the losses of the last steps, the same on all ranks. What it remembers is part of the checkpoints, so
    that a run that was started again finds the same spikes as one that went on."""

    def __init__(self, config: FaultsConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.spike_window)

    def state_dict(self) -> list[float] | None:
        """Its losses, JSON-serialisable; None where it is off."""
        return list(self.losses) if self.config.spike_factor else None

    def load_state_dict(self, state: list[float] | None) -> None:
        self.losses = deque(state or (), maxlen=self.config.spike_window)

    def sees_spike(self, run: RunView) -> bool:
        """Whether the step just done is a spike; else its loss is remembered. Steps that were not finite have been
        skipped and are none."""
        config, loss = self.config, run.last_loss
        if not config.spike_factor or not run.step_was_finite:
            return False
        full = len(self.losses) == config.spike_window
        if full and loss > config.spike_factor * statistics.median(self.losses):
            return True
        self.losses.append(loss)
        return False

    def go_back(self, run: RewindableRun, batches: Iterator[Any]) -> Iterator[Any]:
        """Puts the run back to its newest checkpoint and the data after what was read: the batches from there.

        Without a checkpoint the run goes on as it is. Raises LossSpikeError after `faults.max_rewinds` times.
        """
        loss, rewinds = run.last_loss, run.state.rewinds
        factor = loss / statistics.median(self.losses)
        seen = f"step {run.state.step}: loss {loss:.4g} is {factor:.3g} times the median of {len(self.losses)} steps"
        newest = run.newest_checkpoint()
        if newest is None:
            self.losses.append(loss)
            logger.info(f"{seen}; there is no checkpoint to go back to, training goes on")
            return batches
        if rewinds >= self.config.max_rewinds:
            raise LossSpikeError(
                f"{seen}, and the run has gone back {rewinds} times already (faults.max_rewinds): "
                "try a lower optimizer.lr or a smaller optimizer.max_grad_norm, or look at the data; "
                f"the newest checkpoint, {newest.name}, is from before the spike"
            )

        def words(count: int, first: int, last: int) -> str:
            return (
                f"{seen}: back to {newest.name}, leaving out the samples {first} to {last} "
                f"(rewind {count} of {self.config.max_rewinds})"
            )

        return go_back(run, batches, newest, "rewind", words)
