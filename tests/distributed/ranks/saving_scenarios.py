"""Saves in the background, for the processes of these tests."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from folders import flip_a_bit
from messages import Heard
from scenarios import (
    ENGINES,
    make_engine,
    no_space_at_sync,
    partition_everything,
    place,
    run_steps,
    train_step,
    weights,
)
from torch.distributed.tensor import DTensor

from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.engine.base import Engine
from matmix.train.engine.config import EngineConfig
from matmix.train.process.distributed import gather_objects

HSDP = {"hsdp": {"name": "fsdp2", "replicate": 2}}


class Gate:
    """Holds an engine's writing up until it is opened; `at_once` is how many were written at the same time at most."""

    def __init__(self, engine: Engine) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.at_once = self._writing = 0
        self.snapshots: list[weakref.ref] = []
        self._lock = threading.Lock()
        self._take = engine.snapshot
        engine.snapshot = self._gated

    def _gated(self, *, copy: bool) -> Any:
        snapshot = self._take(copy=copy)
        write = type(snapshot).write
        self.snapshots.append(weakref.ref(snapshot))

        def gated(*arguments: Any, own: Any = self.snapshots[-1]) -> None:
            with self._lock:
                self._writing += 1
                self.at_once = max(self.at_once, self._writing)
            self.reached.set()
            assert self.opened.wait(60)
            write(own(), *arguments)
            with self._lock:
                self._writing -= 1

        snapshot.write = gated
        return snapshot


def state_of(engine: Engine) -> Any:
    """(weights, on this rank all that the optimizer keeps of each parameter)."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)

    def numbers(value: Any) -> list[float]:
        local = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
        return local.flatten().tolist()

    kept = [{entry: numbers(value) for entry, value in state.items()} for state in optimizer.state.values()]
    return weights(engine), kept


def save_while_training(name: str, directory: str) -> dict[str, Any]:
    """Trains on while a save is held up, and saves again before it is done."""
    options = {**ENGINES, **HSDP}[name]
    engine = make_engine(EngineConfig(**options), dropout=0.3)
    manager = CheckpointManager(Path(directory) / name, keep_last=3)
    gate, told = Gate(engine), Heard()
    gc.disable()  # as while training: what is held in a cycle stays
    run_steps(engine, 0, 2, accumulation=1)
    at_two = state_of(engine)
    manager.begin_save(2, engine, {"step": 2})
    history = run_steps(engine, 2, 4, accumulation=1)
    assert state_of(engine) != at_two
    assert gate.reached.wait(60)
    assert not manager.has(2)
    assert told == []
    at_four = state_of(engine)

    told.then = gate.opened.set  # not before it has said that it waits
    manager.begin_save(4, engine, {"step": 4})
    assert manager.has(2)
    history += run_steps(engine, 4, 6, accumulation=1)
    assert manager.wait() is None
    assert manager.wait() is None
    alive = sum(snapshot() is not None for snapshot in gate.snapshots)
    gc.enable()
    manager.save(6, engine, {"step": 6})
    at_six = state_of(engine)

    same = []
    for step, state in ((2, at_two), (4, at_four), (6, at_six)):
        again = make_engine(EngineConfig(**options), dropout=0.3)
        same.append(manager.load(manager.path(step), again) == {"step": step})
        same.append(state_of(again) == state)
        same.append(run_steps(again, step, 6, accumulation=1) == history[step - 2 :])
    files = [path.name for path in (manager.path(2) / "sharded").glob("*.distcp")] if "zero" not in name else []
    return {
        "same": same,
        "told": list(told),
        "at_once": gate.at_once,
        "alive": alive,
        "files": sorted(files),
        "held": engine.host.size,
    }


def fail_in_background(name: str, directory: str) -> dict[str, Any]:
    """A disk that is full on one rank only, while it writes in the background."""
    engine = make_engine(EngineConfig(**ENGINES[name]))
    manager = CheckpointManager(Path(directory) / f"{name}-full", keep_last=1)
    told = Heard()
    failed = []
    for step in (1, 2, 3):
        train_step(engine, step, accumulation=1)
        faulty = step == 2 and engine.rank == (0 if name == "zero0" else engine.world_size - 1)
        with no_space_at_sync() if faulty else contextlib.nullcontext():
            manager.begin_save(step, engine, {"step": step})
            failed.append(manager.wait())
        if step == 2:
            assert manager.steps() == [1]
        engine.all_reduce_sum(torch.zeros(1))  # the ranks are still in step with each other
    again = make_engine(EngineConfig(**ENGINES[name]))
    assert manager.load(manager.latest_valid(), again) == {"step": 3}
    assert weights(again) == weights(engine)
    return {
        "failed": failed,
        "complaints": list(told),
        "left": sorted(path.name for path in manager.store.directory.iterdir()),
    }


def damage_one_by_one(name: str, directory: str) -> list[str]:
    """Damages the checkpoints of `save_while_training` on the disk, newest first: what is told, and then used."""
    folder = Path(directory) / name
    told = Heard()
    for step, damage in ((6, truncate), (4, Path.unlink), (2, flip_a_bit)):
        gather_objects(None)  # no rank is still reading
        if place().rank == 0:
            checkpoint = folder / f"step-{step:08d}"
            damage(
                max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
            )
        gather_objects(None)
        try:
            told.append(f"used: {CheckpointManager(folder).latest_valid().name}")
        except ValueError as error:
            told.append(str(error))
    return list(told)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def in_background_all(names: list[str], directory: str) -> dict[str, Any]:
    partition_everything()
    return {
        name: save_while_training(name, directory)
        | {"damaged": damage_one_by_one(name, directory)}
        | (fail_in_background(name, directory) if name in ENGINES else {})
        for name in names
    }
