"""One run of the study, in this process, watched at every step."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from matmix.model.build import count_parameters
from matmix.model.config import model_config_to_dict
from matmix.train.callbacks import Callback, RunView
from matmix.train.config import RunConfig
from matmix.train.errors import NonFiniteError
from matmix.train.evaluators.context import PREFIX
from matmix.train.loop import Trainer
from matmix.train.process import stop
from matmix.train.process.distributed import Distributed

CURVE = 10
"""A point of the training curve is the mean loss of so many steps."""


def finite(value: float | None, digits: int = 5) -> float | None:
    """Returns a value in which numbers that JSON lacks are None."""
    return round(float(value), digits) if value is not None and math.isfinite(value) else None


class Watch(Callback):
    """The losses of all steps, the largest log-norms of states, and the steps that were not finite."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.bad: list[int] = []
        self.norms: list[float] = []

    def on_step(self, run: RunView) -> None:
        self.losses.append(run.last_loss)
        if not run.step_was_finite:
            self.bad.append(run.state.step)
        for name, value in run.engine.module.monitor().items():
            if name.endswith("log_norm_max") and math.isfinite(value):
                self.norms.append(float(value))

    def curve(self) -> list[float | None]:
        """Returns mean losses of `CURVE` steps each; None where one of them is not finite."""
        groups = [self.losses[begin : begin + CURVE] for begin in range(0, len(self.losses), CURVE)]
        return [finite(sum(group) / len(group), 4) for group in groups]


def run(config: RunConfig, weights: Path | None = None) -> dict[str, Any]:
    """Trains and evaluates; the weights of the last finite step go to `weights`.

    Raises KeyboardInterrupt where a signal ended the run: half a run is no result.
    """
    watch, began = Watch(), time.perf_counter()
    with (
        stop.during_run(),
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),  # each skipped step is told
        Distributed.from_environment(config.device) as distributed,
    ):
        trainer = Trainer(dataclasses.replace(config, run_dir=f"{folder}/run"), distributed)
        trainer.callbacks.insert(0, watch)
        metrics: dict[str, float] = {}
        with contextlib.suppress(NonFiniteError):  # it diverged, which is the result
            done = trainer.fit()
            if done.signal:
                raise KeyboardInterrupt
            metrics = done.metrics
        if weights is not None:
            model = model_config_to_dict(trainer.config.model)
            sha256 = trainer.loader.facts.tokenizer.sha256
            torch.save({"model": model, "state": trainer.engine.module.state_dict(), "tokenizer": sha256}, weights)
        positions = {name.removeprefix(PREFIX): finite(metrics[name]) for name in metrics if name.startswith(PREFIX)}
        return {
            **{name: finite(metrics.get(name)) for name in ("loss", "context_gain", "mixing_gain", "bits_per_byte")},
            "position_loss": positions,
            "parameters": count_parameters(trainer.config.model),
            "steps": config.steps,
            "first_nan": watch.bad[0] if watch.bad else None,
            "skipped": len(watch.bad),
            "stopped": trainer.state.step if trainer.state.step < config.steps else None,
            "log_norm_max": finite(max(watch.norms, default=None), 3),
            "curve": watch.curve(),
            "seconds": finite(time.perf_counter() - began, 2),
        }
