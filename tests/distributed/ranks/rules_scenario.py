"""What the processes run that train with rules for some parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import scenarios
from scenarios import ENGINES, make_engine

from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.engine.config import EngineConfig

STOP = 3


def resume(names: list[str], directory: str, out: str) -> dict[str, Any]:
    """What follows the checkpoints of `scenarios.stop_and_resume`; and they once more, taken up by engines whose
    optimizers have no rules and saved to `out`/without, and from there by those that have, and saved to `out`/with."""
    found = scenarios.resume_all(names, directory, STOP, 6, 1, ruled=True)
    for name in names:
        source = Path(directory)
        for ruled, folder in ((False, "without"), (True, "with")):
            engine = make_engine(EngineConfig(**ENGINES[name]), ruled=ruled)
            manager = CheckpointManager(source / name)
            manager.load(manager.latest_valid(), engine)
            source = Path(out) / folder
            CheckpointManager(source / name).save(STOP, engine, {})
    return found
