"""What the processes run that change the engine of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import scenarios
from scenarios import ENGINES, make_engine, run_steps, weights

from matmix.train.checkpoint import CheckpointManager
from matmix.train.engine import EngineConfig
from matmix.train.engine.full_state import FullState

STOP, STEPS = 3, 6


def save_all(names: list[str], directory: str) -> dict[str, Any]:
    """Name -> (what follows the checkpoint of step 3 that is written here, weights there)."""
    scenarios.partition_everything()
    found = {}
    for name in names:
        engine = make_engine(EngineConfig(**ENGINES[name]))
        run_steps(engine, 0, STOP, accumulation=1)
        CheckpointManager(Path(directory) / name).save(STOP, engine, {"step": STOP})
        held = weights(engine)
        found[name] = run_steps(engine, STOP, STEPS, accumulation=1), held
    return found


def take_up_all(pairs: list[tuple[str, str]], directory: str, out: str) -> dict[Any, Any]:
    """Loads the portable checkpoint of one engine into another one that has done something else before, saves it
    there, and goes on if the global batch allows it."""
    scenarios.partition_everything()
    found = {}
    for source, name in pairs:
        engine = make_engine(EngineConfig(**ENGINES[name]))
        if scenarios.GLOBAL_BATCH % engine.world_size == 0:
            run_steps(engine, 10, 12, accumulation=1)
        manager = CheckpointManager(Path(directory) / f"{source}-portable")
        assert manager.load(manager.path(STOP), engine) == {"step": STOP}
        CheckpointManager(Path(out) / f"{source}-{name}").save(STOP, engine, {})
        if scenarios.GLOBAL_BATCH % engine.world_size == 0:
            found[source, name] = run_steps(engine, STOP, STEPS, accumulation=1)
    return found


def refuse(state: FullState) -> str:
    """What ZeRO-2 says of a state that it has no room for, leaving everything as it was; stage 0 takes it."""
    make_engine(EngineConfig(**ENGINES["zero0"])).load_full(state)
    engine = make_engine(EngineConfig(**ENGINES["zero2"]))
    before = weights(engine)
    try:
        engine.load_full(state)
    except ValueError as error:
        assert weights(engine) == before
        return str(error)
    return ""
