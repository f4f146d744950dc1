"""Guards against bad steps: gradients that are not finite, losses that jump, shards that are damaged."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.train.callbacks.base import Rewind, RunView
from matmix.train.config import FaultsConfig
from matmix.train.errors import LossSpikeError, NonFiniteError
from matmix.train.process.distributed import gather_objects

logger = logging.getLogger(__name__)

ADVICE = "try a lower optimizer.lr, a longer schedule.warmup or engine.precision = fp32"
"""What to do where a loss is not finite."""
DIVERGED = "steps in a row had a NaN or infinite loss or gradient"
"""In the reason of a run that ended for that."""


class NanGuard:
    """Counts skipped steps, which left weights and moments unchanged, and stops the run after `limit` in a row."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def after_step(self, run: RunView) -> None:
        """Raises NonFiniteError if the step just done was the last one of `limit`."""
        if run.step_was_finite:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        step, (where, advice) = run.state.step, find_overflow(run)
        logger.info(
            f"step {step}: {where}{'; ' if where else ''}loss {run.last_loss:.4g}, gradient norm {run.last_norm:.4g}: "
            f"step skipped, weights unchanged ({self.in_a_row} in a row, the run stops at {self.limit})"
            f"{f'; {advice}' if where else ''}"
        )
        if self.in_a_row >= self.limit:
            saved = max(run.saved_steps(), default=None)
            newest = "there is no checkpoint" if saved is None else f"the newest checkpoint is that of step {saved}"
            raise NonFiniteError(
                f"{self.limit} {DIVERGED} (last: step {step}{f', where {where}' if where else ''}); {newest}; {advice}"
            )

    def after_evaluation(self, run: RunView, metrics: dict[str, float]) -> None:
        """Warns of a validation loss that is NaN or infinite."""
        if not math.isfinite(metrics.get("loss", 0.0)):
            mixers = (block.mixer for block in run.engine.module.blocks if block.mixer is not None)
            advice = next(filter(None, (mixer.overflow_advice() for mixer in mixers)), ADVICE)
            logger.warning(
                f"the validation loss of step {run.state.step} is {metrics['loss']}: on some of that text the "
                f"model leaves the range of floats; {advice}"
            )


def find_overflow(run: RunView) -> tuple[str, str]:
    """Returns which layer's states, from the bottom, first left the range of floats in the last step, or "", and
    advice."""
    for name, value in run.monitored.items():  # in the order of the layers
        _, index, short = name.split(".", 2)  # blocks.<index>.<name of the value>
        mixer = run.engine.module.blocks[int(index)].mixer
        # Minus infinity is the logarithm of states of zeros.
        if math.isnan(value) or value >= mixer.monitor_limits.get(short, math.inf):
            break
    else:
        return "", ADVICE
    kind, _ = run.config.model.layer_kinds()[int(index)]
    construction = getattr(mixer.config, "construction", None)
    kind = f"{kind}, construction {construction}" if construction else kind
    happened = "left the range of float32"
    if math.isfinite(value):
        happened = f"grew to a log-norm of {value:.3g}, where their squares leave the range of float32"
    return f"the states of layer {index} ({kind}) {happened}", mixer.overflow_advice() or ADVICE


class SpikeGuard:
    """Sends the run back to its newest checkpoint where a loss is far above the median of the last ones, and on with
    other data. Off unless `faults.spike_factor` is set.

    Such spikes come from a few bad batches meeting the weights of the moment; PaLM (arXiv 2204.02311, section 5.1)
    found that the same weights with other batches, and the same batches with other weights, pass. The losses are part
    of the checkpoints: a run that was started again finds the spikes of one that went on.
    """

    def __init__(self, config: FaultsConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.spike_window)

    def state_dict(self) -> list[float] | None:
        """Returns the losses, JSON-serialisable; None where the guard is off."""
        return list(self.losses) if self.config.spike_factor else None

    def load_state_dict(self, state: list[float] | None) -> None:
        self.losses = deque(state or (), maxlen=self.config.spike_window)

    def sees_spike(self, run: RunView) -> bool:
        """Returns whether the loss of the step just done is a spike; else remembers it, unless the step was skipped."""
        factor = self.config.spike_factor
        if not factor or not run.step_was_finite:
            return False
        full = len(self.losses) == self.losses.maxlen
        if not (spike := full and run.last_loss > factor * statistics.median(self.losses)):
            self.losses.append(run.last_loss)
        return spike

    def go_back(self, run: RewindableRun, batches: Iterator[Any]) -> Iterator[Any]:
        """Puts the run back to its newest checkpoint, if there is one, and on with the data after what was read;
        returns the batches from there. Raises LossSpikeError after `faults.max_rewinds` times."""
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
        return go_back(run, batches, newest, "rewind", seen)


class RewindableRun(RunView, Protocol):
    """A run that can be put back to one of its checkpoints."""

    loader: Loader

    def newest_checkpoint(self) -> Path | None:
        """Returns the newest valid one, the same on all ranks. Called on all of them."""

    def load(self, newest: Path, *, lost_to: str) -> Any:
        """Puts everything where a checkpoint has it. Called on all ranks."""

    def went_back(self, rewind: Rewind) -> None:
        """Tells the callbacks, and begins a new interval of the records."""


def go_back(
    run: RewindableRun, batches: Iterator[Any], checkpoint: Path, kind: Literal["rewind", "restore"], seen: str
) -> Iterator[Any]:
    """Puts the run back to a checkpoint and returns the batches from there: a restore reads the same data again, a
    rewind goes on with the data after what was read. seen: why, for the log."""
    state, read, limit = run.state, run.loader.samples, run.config.faults.max_rewinds
    batches.close()
    run.load(checkpoint, lost_to="rewinds")
    first = run.loader.samples
    if kind == "rewind":
        run.loader.samples, run.state.rewinds = read, state.rewinds + 1
        left_out = f", leaving out the samples {first} to {read - 1}"
        logger.info(f"{seen}: back to {checkpoint.name}{left_out} (rewind {run.state.rewinds} of {limit})")
    else:
        run.state.restores = state.restores + 1
        logger.warning(f"{seen}: back to {checkpoint.name} (restore {run.state.restores} of at most {limit})")
    run.went_back(Rewind(state.step, kind))
    return iter(run.loader)


class DamagedShards:
    """Collects the damaged shards that all ranks' micro-batches report (`data.skip_damaged`); tells of each once."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._new: dict[str, str] = {}

    def count(self, micro_batches: Sequence[Batch]) -> tuple[int, int]:
        """Returns the numbers of this rank's rows without data and of shards that nobody has been told of: where the
        sum of the second over all ranks is not 0, `share` follows."""
        reported = {where: why for batch in micro_batches for where, why in batch.damaged.items()}
        self._new = {where: why for where, why in reported.items() if where not in self._told}
        return sum(batch.n_damaged for batch in micro_batches), len(self._new)

    def share(self) -> None:
        """Tells of the new ones of all ranks. Called on all ranks."""
        reasons = {where: why for new in gather_objects(self._new) for where, why in new.items()}
        for where in sorted(reasons.keys() - self._told):
            logger.warning(f"leaving out the sequences of a damaged shard: {reasons[where]}")
        self._told |= reasons.keys()
