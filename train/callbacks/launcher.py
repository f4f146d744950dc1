"""Ranks whose launcher was killed save and stop: nothing else would ever end them, and a new start would find them in
its way."""

from __future__ import annotations

import os

from matmix.train import stop
from matmix.train.callbacks.base import Callback


class LauncherGone(Callback):
    """Asks the run to stop when torchrun's agent, the parent of this process, is no longer there.

    Only under torchrun: a run that a person starts in a shell may outlive it.
    """

    main_rank_only = False

    def __init__(self) -> None:
        self.parent = os.getppid()

    def on_step(self, trainer) -> None:
        if os.getppid() != self.parent and not stop.received():
            trainer.tell("the launcher of this run is gone: the run will save and stop")
            stop.request()


def under_torchrun() -> bool:
    """Whether torchrun's agent started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
