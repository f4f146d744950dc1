"""Says once that training waits for its data."""

from __future__ import annotations

from matmix.train.callbacks.base import Callback, StepRecord

# The share of an interval from which on waiting is worth a line.
MUCH = 0.5


class DataWait(Callback):
    """A hint at the first interval that mostly waited. The interval in which reading begins is not counted."""

    def __init__(self) -> None:
        self.intervals = 0
        self.told = False

    def on_record(self, trainer, record: StepRecord) -> None:
        self.intervals += 1
        if self.told or self.intervals == 1 or record.data_wait <= MUCH:
            return
        self.told = True
        trainer.tell(
            f"step {record.step}: waiting for data {record.data_wait:.0%} of the time: raise data.workers "
            f"(now {trainer.config.data.workers}) or data.prefetch (now {trainer.config.data.prefetch}), "
            "or put the data on a faster disk"
        )
