"""A torch.profiler trace of a window of steps, for chrome://tracing or Perfetto."""

from __future__ import annotations

import logging

import torch

from matmix.train.callbacks.base import Callback, RunView

logger = logging.getLogger(__name__)


class Profiler(Callback):
    """Traces `logging.profile_steps` steps from `logging.profile_start` into RUN/profile/step-N.json."""

    def __init__(self, start: int, steps: int) -> None:
        self.start, self.steps = start, steps
        self.profile: torch.profiler.profile | None = None

    def on_start(self, run: RunView) -> None:
        self._begin(run)

    def on_step(self, run: RunView) -> None:
        if self.profile is not None and run.state.step == self.start + self.steps - 1:
            self._finish(run)
        self._begin(run)

    def on_end(self, run: RunView) -> None:
        if self.profile is not None:
            self._finish(run)

    def _begin(self, run: RunView) -> None:
        if self.profile is None and run.state.step + 1 == self.start:
            self.profile = torch.profiler.profile(record_shapes=True, profile_memory=True, acc_events=True)
            self.profile.__enter__()

    def _finish(self, run: RunView) -> None:
        profile, self.profile = self.profile, None
        profile.__exit__(None, None, None)
        folder = run.path / "profile"
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{self.start:08d}.json"
        profile.export_chrome_trace(str(path))
        logger.info(f"profiler trace of steps {self.start} to {run.state.step} written to {path}")
