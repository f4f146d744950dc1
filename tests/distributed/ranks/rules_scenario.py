"""What the processes run that train with rules for some parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import scenarios
from scenarios import ENGINES, make_engine, run_steps, weights

from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.engine.config import EngineConfig

STOP, STEPS = 3, 12


def losses_of(options: dict[str, Any], steps: int, accumulation: int) -> Any:
    """(history of (loss, norm), final weights, norms of the clipping groups in the last step)."""
    scenarios.partition_everything()
    engine = make_engine(EngineConfig(**options), ruled=True)
    history = run_steps(engine, 0, steps, accumulation=accumulation)
    return history, weights(engine), {name: float(norm) for name, norm in engine.clip_norms.items()}


def losses_of_all(runs: list[tuple[dict[str, Any], int, int]]) -> list[Any]:
    return [losses_of(*run) for run in runs]


def everything(engines: dict[str, Any], resumed: list[str], directory: str) -> dict[str, Any]:
    """Of engines by name: runs, runs with bad steps, and, of those to be resumed, what follows a checkpoint."""
    options = {"dropout": 0.0, "stop": STOP, "steps": 6, "accumulation": 2, "ruled": True}
    return {
        "losses": {name: losses_of(engine, STEPS, 2) for name, engine in engines.items()},
        "poisoned": scenarios.poison_and_discard_all(list(engines), True),
        "resumed": scenarios.stop_and_resume_all(resumed, directory, options),
    }


def resume(names: list[str], directory: str, out: str) -> dict[str, Any]:
    """What follows the checkpoints of `everything`; and they once more, taken up by engines whose optimizers have no
    rules and saved to `out`/without, and taken up from there by those that have, and saved to `out`/with."""
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
