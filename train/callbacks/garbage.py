"""Garbage collection at the same step on every rank: a rank that stops to collect makes all the others wait."""

from __future__ import annotations

import gc

from matmix.train.callbacks.base import Callback


class GarbageCollection(Callback):
    """Turns automatic collection off while training and collects every `every` steps."""

    main_rank_only = False

    def __init__(self, every: int) -> None:
        self.every = every

    def on_start(self, trainer) -> None:
        gc.collect()
        gc.disable()

    def on_step(self, trainer) -> None:
        if trainer.state.step % self.every == 0:
            gc.collect(1)

    def on_end(self, trainer) -> None:
        gc.enable()
