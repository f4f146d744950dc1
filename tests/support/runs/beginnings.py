"""The weights that a run begins with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from saved_weights import read_weights

from matmix.train.loop import Trainer
from matmix.train.process.distributed import Distributed, barrier
from matmix.train.recipe import load_config


def first_weights(recipe: str, arguments: Sequence[str]) -> dict[str, torch.Tensor]:
    """Full weights before the first step, by name; on all ranks."""
    config = load_config(recipe, [*arguments, "--device", "cpu"])
    with Distributed.from_environment("cpu") as distributed:
        trainer = Trainer(config, distributed)
        try:
            trainer.restore()
            path = trainer.checkpoints.save(0, trainer.engine, trainer.extra())
            barrier()
            return dict(read_weights(path))
        finally:
            trainer.loader.close()
            trainer.lock.release()
