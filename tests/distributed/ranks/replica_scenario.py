"""Copies of a model that one rank's device changes, for the processes of a test."""

from __future__ import annotations

import math
from typing import Any

import torch
from scenarios import make_engine, moments, partition_everything, place, run_steps, train_step, weights

from matmix.train.config import FaultsConfig
from matmix.train.engine.base import Engine
from matmix.train.engine.config import EngineConfig
from matmix.train.guards.replicas import Replicas
from matmix.train.process.distributed import gather_objects

LAST = 1


def _reduced_gradient(engine: Engine) -> torch.Tensor:
    """Some of this rank's gradients, after the ranks have summed them."""
    if engine.kind == "deepspeed" and engine.config.zero_stage > 0:
        return next(tensor for tensors in engine.optimizer.averaged_gradients.values() for tensor in tensors)
    gradient = next(parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None)
    return getattr(gradient, "_local_tensor", gradient)


def change_after_reduction(options: dict[str, Any], factor: float) -> dict[str, Any]:
    """A run in which the gradients of rank 1, and of that rank alone, are changed in its third step."""
    partition_everything()
    engine = make_engine(EngineConfig(**options))
    run_steps(engine, 0, 2, accumulation=1)
    before, update = (weights(engine), moments(engine)), engine.step

    def faulty(max_norm: float) -> Any:
        if place().rank == LAST:
            gradient = _reduced_gradient(engine)
            gradient.flatten()[0] *= factor
        return update(max_norm)

    engine.step = faulty
    _, norm = train_step(engine, 2, accumulation=1)
    engine.step = update
    flags = torch.tensor(float(engine.gradients_differ))
    found = {
        "finite": math.isfinite(norm),
        "unchanged": (weights(engine), moments(engine)) == before,
        "differ": engine.all_reduce_sum(flags).item() > 0,
        "difference": Replicas(FaultsConfig(), engine).find_difference(3),
    }
    after = run_steps(engine, 3, 5, accumulation=1)
    found["same_norms"] = len({repr(each) for each in gather_objects(after)}) == 1
    return found


def changes_after_reduction(engines: dict[str, dict[str, Any]], factor: float) -> dict[str, dict[str, Any]]:
    return {name: change_after_reduction(options, factor) for name, options in engines.items()}


def find_flips(engines: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """For each engine: what a comparison says of an unharmed run, and after a bit of rank 1 has changed: in weights, in
    moments (where they have copies), in a buffer."""
    partition_everything()
    found = {}
    for name, options in engines.items():
        engine = make_engine(EngineConfig(**options))
        run_steps(engine, 0, 2, accumulation=2)
        said = [Replicas(FaultsConfig(), engine).find_difference(2)]
        for wanted in ("model.blocks.1.up.weight", "optimizer.blocks.1.up.weight.exp_avg_sq", "model.scale"):
            tensors = {**dict(engine.copied_tensors()), **dict(engine.common_tensors())}
            if wanted not in tensors:
                continue
            raw = tensors[wanted].detach().view(torch.int32)
            if engine.rank == LAST:
                raw[-1] ^= 1
            said.append(Replicas(FaultsConfig(), engine).find_difference(2))
            if engine.rank == LAST:
                raw[-1] ^= 1
        found[name] = said
    return found
