"""A progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from matmix.train.callbacks.base import Callback, StepRecord
from matmix.train.words import duration, short_number

_SECONDS_BETWEEN_LINES = 10.0


class Progress(Callback):
    """Shows steps, loss, learning rate, tokens per second and the time left."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self.last_line = 0.0

    def on_start(self, trainer) -> None:
        if sys.stderr.isatty() and trainer.state.step < trainer.config.last_step:
            self.bar = tqdm(
                total=trainer.config.last_step,
                initial=trainer.state.step,
                desc=trainer.run.path.name,
                unit="step",
                dynamic_ncols=True,
            )

    def on_step(self, trainer) -> None:
        if self.bar is not None:
            self.bar.update(1)

    def on_record(self, trainer, record: StepRecord) -> None:
        speed = f"{short_number(record.tokens_per_second)} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {record.loss:.3f}, lr {record.lr:.2e}, {speed}", refresh=False)
            return
        now, last = time.monotonic(), trainer.config.last_step
        if now - self.last_line < _SECONDS_BETWEEN_LINES and record.step != last:
            return
        self.last_line = now
        left = duration((last - record.step) * record.seconds_per_step)
        self._write(
            f"step {record.step}/{last}  loss {record.loss:.4f}  lr {record.lr:.2e}  "
            f"grad norm {record.grad_norm:.3g}  {speed}  {left} left"
        )

    def on_evaluation(self, trainer, metrics: dict[str, float]) -> None:
        parts = [words for evaluator, _ in trainer.evaluators for words in evaluator.progress(metrics)]
        self._write(f"step {trainer.state.step}: {', '.join(parts)}")

    def on_rewind(self, trainer, step: int, kind: str) -> None:
        if self.bar is not None:
            self.bar.update(trainer.state.step - self.bar.n)

    def on_message(self, trainer, text: str) -> None:
        self._write(text)

    def on_end(self, trainer) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _write(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)
