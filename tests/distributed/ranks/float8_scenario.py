"""Runs whose products in fp8 are emulated: rounded as on a GPU, and multiplied in float32."""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import scenarios
import torch

from matmix.model import MixerOptions, ModelConfig, build_model, initialize
from matmix.model.mixers.scans.hydra import HydraConfig
from matmix.train.activation import compute_in_float8
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.engine import base, build
from matmix.train.engine.base import Engine
from matmix.train.engine.config import EngineConfig
from matmix.train.tasks.cross_entropy import linear_cross_entropy

VOCABULARY = 48
OPTIONS = MixerOptions(hydra=HydraConfig(headdim=16))  # 8 heads, so that the rows of in_proj are a multiple of 16
MODELS = {
    name: ModelConfig(
        architecture=kind, layers=(name,), n_layers=2, d_model=64, mlp_ratio=2, vocab_size=VOCABULARY, mixers=OPTIONS
    )
    for name, kind in (("hydra", "encoder"), ("mru", "language_model"))
}


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Within it `engine.fp8` runs on a CPU, in the autocast that it asks torch about, which is that of GPUs."""
    convert = functools.partial(compute_in_float8, emulate=True)
    was = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with (
        unittest.mock.patch.object(base, "compute_in_float8", convert),
        unittest.mock.patch.object(build, "check_float8", return_value=None),
    ):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", was[0])
            torch.set_autocast_dtype("cuda", was[1])


def make_engine(mixer: str, options: dict[str, Any]) -> Engine:
    engine = build.build_engine(EngineConfig(precision="bf16", **options), scenarios.place())
    model = build_model(MODELS[mixer], device="meta")
    engine.prepare(model, lambda model: initialize(model, seed=0), scenarios.make_optimizer)
    return engine


def run_steps(engine: Engine, first: int, last: int) -> list[float]:
    """The mean losses of steps on 4 x 13 tokens, of which each rank computes its rows: the next token is the last one
    and 5."""
    losses = []
    for step in range(first, last):
        start = torch.randint(0, VOCABULARY, (4, 1), generator=torch.Generator().manual_seed(step))
        tokens = (start + 5 * torch.arange(14)) % VOCABULARY
        own = tokens[engine.rank :: engine.world_size]
        readout = functools.partial(linear_cross_entropy, targets=own[:, 1:].flatten())
        loss = engine.model(own[:, :-1], readout=readout).total / tokens[:, 1:].numel()
        engine.backward(loss, last=True)
        engine.step(1.0)
        losses.append(engine.all_reduce_sum(loss.detach().clone()).item())
    return losses


def losses_of(mixer: str, options: dict[str, Any], steps: int) -> list[float]:
    with emulated():
        return run_steps(make_engine(mixer, options), 0, steps)


def losses_of_all(mixer: str, runs: list[dict[str, Any]], steps: int) -> list[list[float]]:
    return [losses_of(mixer, options, steps) for options in runs]


def change_over(before: dict[str, Any], after: dict[str, Any], directory: Path) -> tuple[list[float], list[float]]:
    """The losses of two steps by a run with these options, behind a checkpoint; and from there with the others."""
    with emulated():
        engine, manager = make_engine("mru", before), CheckpointManager(directory)
        run_steps(engine, 0, 2)
        manager.save(2, engine, {})
        again = make_engine("mru", after)
        manager.load(manager.path(2), again)
        assert scenarios.weights(again) == scenarios.weights(engine)
        assert scenarios.moments(again) == scenarios.moments(engine)
        assert again.layout() == engine.layout()
        return run_steps(engine, 2, 4), run_steps(again, 2, 4)
