"""What the processes run that train with rules for some parameters."""

from __future__ import annotations

from pathlib import Path

import scenarios
from scenarios import ENGINES, make_engine

from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.engine.config import EngineConfig

STOP = 3


def resume(names: list[str], directory: str) -> None:
    """The checkpoints of `scenarios.stop_and_resume` are taken up by engines whose optimizers have no rules and saved
    to `directory`/without, and from there by those that have, and saved to `directory`/with."""
    scenarios.partition_everything()
    for name in names:
        source = Path(directory)
        for ruled, folder in ((False, "without"), (True, "with")):
            engine = make_engine(EngineConfig(**ENGINES[name]), ruled=ruled)
            manager = CheckpointManager(source / name)
            manager.load(manager.latest_valid(), engine)
            source = Path(directory) / folder
            CheckpointManager(source / name).save(STOP, engine, {})
