"""Runs of a small model with Muon, on any engine and number of ranks."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple
from unittest import mock

import scenarios
import torch
import torch.distributed as dist
from scenarios import WIDTH, weights
from torch import nn

from matmix.model.parameter_rules import NOT_DECAYED, ParameterRule
from matmix.train.engine.build import build_engine
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.mesh import MeshShape
from matmix.train.optim import muon, owners
from matmix.train.optim.base import local_part
from matmix.train.optim.config import OptimizerConfig
from matmix.train.optim.groups import make_optimizer

STEPS, BATCH = 20, 12


class Block(scenarios.Block):
    """`up` is three maps, whose borders are not those of any ranks' rows; `gate` has fewer rows than there are ranks;
    there are more rows than columns, and fewer."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.tanh(self.gate(x)).unsqueeze(-1).unbind(-2)
        return x + (super().forward(x) - x) * (1 + first) + second * x.roll(1, -1)

    def parameter_rules(self, seqlen: int) -> dict[str, ParameterRule]:
        return {"up.weight": ParameterRule(blocks=(7, 19, 4)), "A_log": NOT_DECAYED}


MAPS = 2 * 5
"""Of all layers."""


class Trained(NamedTuple):
    """What one rank has seen."""

    weights: dict[str, list[float]]
    count: int
    """Maps that it made orthogonal."""
    held: int
    """Elements of momentum that it holds."""
    sent: int
    """Elements that it sent others to and from owners."""
    buffers: int
    """Elements that it held beside parameters, gradients and momentum, when most."""
    planned: float
    """The same, as a plan has it for the rank with most."""


def train(options: dict[str, Any], batch: int = owners.BATCH) -> Trained:
    count = sent = exchanges = came = results = most = 0
    orthogonal, all_to_all = muon.orthogonal, dist.all_to_all_single

    def counted(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
        nonlocal count, results
        count += 1
        results += matrix.numel()
        return orthogonal(matrix, iterations)

    def noted(received: torch.Tensor, given: torch.Tensor, taken: list[int], sizes: list[int], *, group: Any) -> None:
        nonlocal sent, exchanges, came, results, most
        sent += sum(sizes) - sizes[dist.get_rank(group)]
        if exchanges % 2:  # the results go out
            most = max(most, came + results + given.numel() + received.numel())
        else:
            came, results = received.numel(), 0
        exchanges += 1
        all_to_all(received, given, taken, sizes, group=group)

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (scenarios, "Block", Block), (scenarios, "GLOBAL_BATCH", BATCH), (muon, "orthogonal", counted),
            (owners, "BATCH", batch), (dist, "all_to_all_single", noted),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, value))
        engine = build_engine(EngineConfig(**options), scenarios.place())
        with torch.device("meta"):
            model = scenarios.Toy(layers=2)
        config = OptimizerConfig(name="muon", weight_decay=0.3, lr=1e-2)
        engine.prepare(model, scenarios.initialize, lambda model: make_optimizer(model, config, scenarios.LENGTH))
        scenarios.run_steps(engine, 0, STEPS, accumulation=1)
        kept = [state["momentum"] for _, state in engine.optimizer.named_state() if "momentum" in state]
        held = sum(local_part(momentum).numel() for momentum in kept)
        shape = MeshShape.of(engine.config, engine.world_size) if engine.kind == "torch" else MeshShape()
        planned = engine.optimizer.step_cost(shape.copies, shape.parts).bytes / 4
        return Trained(weights(engine), count, held, sent, most, planned)


def train_all(runs: list[tuple[dict[str, Any], int]]) -> list[Any]:
    return [train(*run) for run in runs]
