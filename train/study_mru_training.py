"""The runs of the study of MRU constructions: the quickstart with other state matrices, watched at every step."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from matmix.model.mixers.mru import MRUConfig
from matmix.train import stop
from matmix.train.callbacks import Callback
from matmix.train.config import RunConfig
from matmix.train.distributed import Distributed
from matmix.train.errors import NonFiniteError
from matmix.train.loop import Trainer
from matmix.train.recipe import load_config

RECIPE = "mru_shakespeare"


def finite(value: float) -> float | None:
    """What JSON has no number for becomes None."""
    return float(value) if math.isfinite(value) else None


class Watch(Callback):
    """Loss and log-norms (largest and mean over layers) of every step, and the steps that were not finite."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.bad: list[int] = []

    def on_step(self, trainer: Trainer) -> None:
        monitored = trainer.engine.module.monitor()
        largest = [float(value) for name, value in monitored.items() if name.endswith("log_norm_max")]
        means = [float(value) for name, value in monitored.items() if name.endswith("log_norm_mean")]
        step = trainer.state.step
        if not trainer.step_was_finite:
            self.bad.append(step)
        self.steps.append(
            {
                "step": step,
                "loss": finite(trainer.last_loss),
                # max() passes over NaN or not, by the order of its arguments.
                "log_norm_max": finite(max(largest)) if largest and all(map(math.isfinite, largest)) else None,
                "log_norm_mean": finite(sum(means) / len(means)) if means else None,
            }
        )


def configure(options: dict[str, Any], overrides: list[str]) -> RunConfig:
    """The quickstart on the CPU with these options of MRUConfig."""
    off = [f"--logging.{name}=False" for name in ("progress", "tensorboard")]
    off += [f"--{name}.every=0" for name in ("evaluation", "checkpoint")]
    config = load_config(RECIPE, ["--device=cpu", *off, *overrides])
    if options["construction"] == "none":
        return dataclasses.replace(config, model=dataclasses.replace(config.model, layers=("mlp",)))
    mru = dataclasses.replace(config.model.mixers.mru, **options)
    assert isinstance(mru, MRUConfig)
    mixers = dataclasses.replace(config.model.mixers, mru=mru)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, mixers=mixers))


def run(config: RunConfig, weights: Path | None) -> dict[str, Any]:
    """Train; the weights of the last finite step go to `weights`."""
    watch = Watch()
    with (
        stop.during_run(),
        tempfile.TemporaryDirectory() as folder,
        Distributed.from_environment("cpu") as distributed,
    ):
        trainer = Trainer(dataclasses.replace(config, run_dir=f"{folder}/run"), distributed)
        trainer.callbacks.insert(0, watch)
        try:
            done = trainer.fit()
            if done.signal:
                raise KeyboardInterrupt  # half a run is no result
            metrics, stopped = done.metrics, None
        except NonFiniteError:
            metrics, stopped = {}, trainer.state.step
        if weights is not None:
            model = dataclasses.asdict(trainer.config.model)
            torch.save({"model": model, "state": trainer.engine.module.state_dict()}, weights)
        return {
            "validation_loss": finite(metrics.get("loss", math.nan)),
            "bits_per_byte": finite(metrics.get("bits_per_byte", math.nan)),
            "tokens": trainer.state.tokens,
            "first_nan": watch.bad[0] if watch.bad else None,
            "skipped": len(watch.bad),
            "stopped": stopped,
            "steps": watch.steps,
            "decays": decays(trainer.engine.module),
        }


def decays(model: torch.nn.Module) -> list[float]:
    """The numbers that state matrices are multiplied by, all heads of all layers."""
    roots = [parameter for name, parameter in model.named_parameters() if name.endswith("decay_root")]
    return [float(value) for root in roots for value in 1 / (1 + root.detach().square())]


def train_short(options: dict[str, Any], rate: float, data: str, steps: int, weights: Path) -> dict[str, Any]:
    """The quickstart for `steps` steps at a learning rate."""
    overrides = ["--data.path", data, "--steps", str(steps), "--optimizer.lr", str(rate)]
    return run(configure(options, overrides), weights)


def train_long(options: dict[str, Any], data: str, steps: int) -> dict[str, Any]:
    """The quickstart's model at 8,192 tokens, two sequences a step, with a warm-up of 10 steps."""
    overrides = ["--data.path", data, "--data.seqlen", "8192", "--global-batch-size", "2", "--micro-batch-size", "1"]
    overrides += ["--steps", str(steps + 1), "--stop-step", str(steps), "--schedule.warmup", "10"]
    return run(configure(options, overrides), None)
