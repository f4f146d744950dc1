"""A progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from matmix.train.callbacks.base import Callback, Rewind, RunView, StepRecord
from matmix.train.evaluators.averaged import TITLE, of_averaged
from matmix.train.words import duration, short_number

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0


class Progress(Callback):
    """Shows steps, loss, learning rate, tokens or images per second and the time left."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self.last_line = 0.0

    def on_start(self, run: RunView) -> None:
        if sys.stderr.isatty() and run.state.step < run.config.last_step:
            self.bar = tqdm(
                total=run.config.last_step,
                initial=run.state.step,
                desc=run.path.name,
                unit="step",
                dynamic_ncols=True,
            )

    def on_step(self, run: RunView) -> None:
        if self.bar is not None:
            self.bar.update(1)

    def on_record(self, run: RunView, record: StepRecord) -> None:
        speed = f"{short_number(record.tokens_per_second)} {record.unit}/s"
        skipped = math.isnan(record.loss)
        if self.bar is not None:
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
        def words(found: Mapping[str, float]) -> str:
            return ", ".join(part for evaluator, _ in run.evaluators for part in evaluator.progress(found))

        averaged = f"; {TITLE}: {words(found)}" if (found := of_averaged(metrics)) else ""
        logger.info(f"step {run.state.step}: {words(metrics)}{averaged}")

    def on_rewind(self, run: RunView, rewind: Rewind) -> None:
        if self.bar is not None:
            self.bar.update(run.state.step - self.bar.n)

    def on_end(self, run: RunView) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
