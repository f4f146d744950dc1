"""Small callbacks: garbage collection, a check that the launcher is alive, a hint about slow data."""

from __future__ import annotations

import gc
import logging

from matmix.train.callbacks.base import Callback, RunView, StepRecord
from matmix.train.process import launched, stop

logger = logging.getLogger(__name__)

MUCH_WAITING = 0.5
"""If waiting for data takes more than this share of an interval, a line says so."""


class GarbageCollection(Callback):
    """Turns automatic collection off while training and collects every `every` steps, at the same step on every rank:
    a rank that stops to collect makes all the others wait."""

    main_rank_only = False

    def __init__(self, every: int) -> None:
        self.every = every

    def on_start(self, run: RunView) -> None:
        gc.collect()
        gc.disable()

    def on_step(self, run: RunView) -> None:
        if run.state.step % self.every == 0:
            gc.collect(1)

    def on_end(self, run: RunView) -> None:
        gc.enable()


class LauncherGone(Callback):
    """Asks the run to save and stop when the launcher of this process is no longer there: nothing else would ever end
    its ranks, and a new start would find them in its way."""

    main_rank_only = False

    def __init__(self) -> None:
        self.asked = self.told = False

    def on_step(self, run: RunView) -> None:
        if not self.asked:  # now there is a step to lose
            self.asked = True
            launched.save_when_it_ends()
        if self._tells():
            stop.request()

    def on_end(self, run: RunView) -> None:
        self._tells()  # ranks may have agreed to stop by the kernel's signal before this one looked

    def _tells(self) -> bool:
        """Whether the launcher is seen to be gone for the first time, which is then told."""
        if self.told or not launched.is_gone():
            return False
        self.told = True
        logger.info("the launcher of this run is gone: the run saves and stops")
        return True


class DataWait(Callback):
    """Gives a hint at the first interval that mostly waited for data. The interval in which reading begins does not
    count."""

    def __init__(self) -> None:
        self.intervals = 0
        self.told = False

    def on_record(self, run: RunView, record: StepRecord) -> None:
        self.intervals += 1
        if self.told or self.intervals == 1 or record.data_wait <= MUCH_WAITING:
            return
        self.told = True
        logger.info(
            f"step {record.step}: waiting for data {record.data_wait:.0%} of the time: raise data.workers "
            f"(now {run.config.data.workers}) or data.prefetch (now {run.config.data.prefetch}), "
            "or put the data on a faster disk"
        )
