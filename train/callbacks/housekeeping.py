"""Callbacks of few lines: progress, slow data, a profiler's trace, garbage collection, a launcher that is gone."""

import gc
import logging
import math
import sys
import time
from collections.abc import Mapping

import torch
from tqdm import tqdm

from matmix.train.callbacks.base import Callback, Rewind, RunView, StepRecord
from matmix.train.evaluators.base import TITLE, of_averaged
from matmix.train.process import launched, stop
from matmix.train.words import duration, short_number

logger = logging.getLogger(__name__)

MUCH_WAITING = 0.5
"""If waiting for data takes more than this share of an interval, a line says so."""
_SECONDS_BETWEEN_LINES = 10.0


class Progress(Callback):
    """Shows steps, loss, learning rate, tokens or images per second and the time left."""

    def __init__(self) -> None:
        self.bar = tqdm(disable=True)
        self.last_line = 0.0

    def on_start(self, run: RunView) -> None:
        step, last, hidden = run.state.step, run.config.last_step, not sys.stderr.isatty()
        shown = {"desc": run.path.name, "unit": "step", "dynamic_ncols": True, "disable": hidden or step >= last}
        self.bar = tqdm(total=last, initial=step, **shown)

    def on_step(self, run: RunView) -> None:
        self.bar.update(1)

    def on_record(self, run: RunView, record: StepRecord) -> None:
        speed = f"{short_number(record.tokens_per_second)} {record.unit}/s"
        skipped = math.isnan(record.loss)
        if not self.bar.disable:
            loss = "all steps skipped" if skipped else f"loss {record.loss:.3f}"
            self.bar.set_postfix_str(f"{loss}, lr {record.lr:.2e}, {speed}", refresh=False)
            return
        now, last = time.monotonic(), run.config.last_step
        if now - self.last_line < _SECONDS_BETWEEN_LINES and record.step != last:
            return
        self.last_line = now
        left = duration((last - record.step) * record.seconds_per_step)
        loss = "all steps since the last record skipped" if skipped else f"loss {record.loss:.4f}"
        logger.info(
            f"step {record.step}/{last}  {loss}  lr {record.lr:.2e}  "
            f"grad norm {record.grad_norm:.3g}  {speed}  {left} left"
        )

    def on_evaluation(self, run: RunView, metrics: dict[str, float]) -> None:
        def words(measured: Mapping[str, float]) -> str:
            return ", ".join(part for evaluator, _ in run.evaluators for part in evaluator.progress(measured))

        averaged = of_averaged(metrics)
        logger.info(f"step {run.state.step}: {words(metrics)}{f'; {TITLE}: {words(averaged)}' if averaged else ''}")

    def on_rewind(self, run: RunView, rewind: Rewind) -> None:
        self.bar.update(run.state.step - self.bar.n)

    def on_end(self, run: RunView) -> None:
        self.bar.close()


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
    """Asks the run to save and stop when its launcher is no longer there: nothing else would ever end its ranks."""

    main_rank_only = False

    def __init__(self) -> None:
        self.asked = self.told = False

    def on_step(self, run: RunView) -> None:
        if not self.asked:  # now there is a step to lose
            self.asked = True
            launched.save_when_it_ends()
        if launched.is_gone():
            stop.request()
        self.on_end(run)

    def on_end(self, run: RunView) -> None:
        # Ranks may have agreed to stop by the kernel's signal before this one looked.
        if not self.told and launched.is_gone():
            self.told = True
            logger.info("the launcher of this run is gone: the run saves and stops")


class DataWait(Callback):
    """Gives a hint after the first interval that mostly waited for data, not counting that in which reading begins."""

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


class Profiler(Callback):
    """Traces `logging.profile_steps` steps from `logging.profile_start` into RUN/profile/step-N.json."""

    def __init__(self, start: int, steps: int) -> None:
        self.start, self.steps = start, steps
        self.profile: torch.profiler.profile | None = None

    def on_start(self, run: RunView) -> None:
        if run.state.step + 1 == self.start and self.profile is None:
            self.profile = torch.profiler.profile(record_shapes=True, profile_memory=True, acc_events=True)
            self.profile.__enter__()

    def on_step(self, run: RunView) -> None:
        if run.state.step == self.start + self.steps - 1:
            self.on_end(run)
        self.on_start(run)

    def on_end(self, run: RunView) -> None:
        if self.profile is None:
            return
        profile, self.profile = self.profile, None
        profile.__exit__(None, None, None)
        folder = run.path / "profile"
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{self.start:08d}.json"
        profile.export_chrome_trace(str(path))
        logger.info(f"profiler trace of steps {self.start} to {run.state.step} written to {path}")
