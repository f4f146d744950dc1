"""What the processes run that change the engine of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import scenarios
import torch
from scenarios import ENGINES, make_engine, run_steps, weights

from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.checkpoint.manifest import read_manifest
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.full_state import Entry, FullState
from matmix.train.engine.kinds import open_full

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


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    state = open_full(checkpoint, read_manifest(checkpoint)["layout"])
    return {key: state.read_whole(key) for key in state.entries}


class Unequal(FullState):
    """A state in which one tensor was updated more often than the others."""

    def __init__(self, checkpoint: Path) -> None:
        self.held = contents(checkpoint)
        self.held["optimizer.norm.bias.step"] += 1
        self.entries = {key: Entry(tuple(tensor.shape)) for key, tensor in self.held.items()}

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.held[key].flatten()[start:stop].clone()


def refuse(checkpoint: str) -> str:
    """What ZeRO-2 says of a state that it has no room for, leaving everything as it was; stage 0 takes it."""
    state = Unequal(Path(checkpoint))
    make_engine(EngineConfig(**ENGINES["zero0"])).load(state)
    engine = make_engine(EngineConfig(**ENGINES["zero2"]))
    before = weights(engine)
    try:
        engine.load(state)
    except ValueError as error:
        assert weights(engine) == before
        return str(error)
    return ""
