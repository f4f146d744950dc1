"""A model with a layer of every mixer, trained for some steps by an engine on one or several ranks."""

from __future__ import annotations

import dataclasses

import torch
from every_mixer import SEQLEN, encoder_of_all, language_model_of_all

from matmix.model import ModelConfig, build_model, initialize
from matmix.train.engine.build import build_engine
from matmix.train.engine.config import EngineConfig
from matmix.train.optim.config import OptimizerConfig
from matmix.train.optim.groups import make_optimizer
from matmix.train.process.distributed import Distributed

BATCH = 4


def losses_of_all_mixers(engine: dict, steps: int = 3) -> list[list[float]]:
    """Losses over steps of the encoder and of the language model."""
    configs = (dataclasses.replace(config, init_std=0.02) for config in (encoder_of_all(), language_model_of_all()))
    return [_losses(config, engine, steps) for config in configs]


def _losses(config: ModelConfig, options: dict, steps: int) -> list[float]:
    distributed = Distributed.from_environment("cpu")
    engine = build_engine(EngineConfig(**options), distributed)
    engine.prepare(
        build_model(config, device="meta"),
        initialize=lambda model: initialize(model, seed=0),
        make_optimizer=lambda model: make_optimizer(model, OptimizerConfig(lr=1e-2), SEQLEN),
    )
    share, losses = BATCH // distributed.world_size, []
    # The same rows at each step: of others, a loss that falls would say nothing.
    ids = torch.randint(29, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(0))
    ids = ids[distributed.rank * share : (distributed.rank + 1) * share]
    for _ in range(steps):
        logits = engine.model(ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten(), reduction="sum")
        engine.backward(loss / (BATCH * SEQLEN), last=True)
        engine.step(1.0)
        losses.append(engine.all_reduce_sum(loss.detach().double()).item() / (BATCH * SEQLEN))
    return losses
