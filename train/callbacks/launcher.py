"""Ranks whose launcher was killed save and stop: nothing else would ever end them, and a new start would find them in
its way."""

from __future__ import annotations

from matmix.train.callbacks.base import Callback
from matmix.train.process import launcher, stop


class LauncherGone(Callback):
    """Asks the run to stop when the launcher of this process is no longer there."""

    main_rank_only = False

    def __init__(self) -> None:
        self.asked = self.told = False

    def on_step(self, trainer) -> None:
        if not self.asked:  # now there is a step to lose
            self.asked = True
            launcher.save_when_it_ends()
        if launcher.is_gone() and not self.told:
            self.told = True
            trainer.tell("the launcher of this run is gone: the run will save and stop")
            stop.request()
