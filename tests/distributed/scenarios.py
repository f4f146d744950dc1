"""A small model and a training run on it, for the processes of these tests.

Kept apart from the tests so that a child process imports this file and what it runs, and not pytest.
"""

from __future__ import annotations

import contextlib
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from matmix.train import rng
from matmix.train.checkpoint import CheckpointManager
from matmix.train.distributed import Distributed
from matmix.train.engine import Engine, EngineConfig, build_engine

VOCABULARY, WIDTH, LENGTH, GLOBAL_BATCH = 33, 10, 6, 8


class Block(nn.Module):
    """Sizes that no number of ranks divides; a decay rate of the kind that bf16 would spoil."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.A_log = nn.Parameter(torch.empty(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay = torch.exp(-torch.exp(self.A_log)).mean()
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * decay


class Toy(nn.Module):
    """A language model with tied weights, a table that is a buffer, and a readout inside forward."""

    def __init__(self, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("positions", torch.empty(LENGTH, WIDTH), persistent=False)
        self.register_buffer("scale", torch.empty(1))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight) * self.scale
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = torch.randn(parameter.shape, generator=generator) * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0)
        if isinstance(parameter, DTensor):
            # Given by value on every rank: no rank's copy is sent to the others.
            full = distribute_tensor(
                full.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        parameter.copy_(full)
    model.positions.copy_(torch.linspace(-1, 1, LENGTH * WIDTH).view(LENGTH, WIDTH))
    model.scale.fill_(0.9)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    def decays(parameter: torch.Tensor) -> bool:
        return len(getattr(parameter, "ds_shape", parameter.shape)) > 1

    groups = [
        {"params": [p for p in model.parameters() if decays(p)], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if not decays(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


def place() -> Distributed:
    return Distributed.from_environment("cpu")


def make_engine(config: EngineConfig, *, layers: int = 3, dropout: float = 0.0, meta: bool = True) -> Engine:
    engine = build_engine(config, place())
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = Toy(layers, dropout)
    engine.prepare(model, initialize, make_optimizer)
    return engine


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH), generator=generator)
    targets = (tokens + 1) % VOCABULARY
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100  # ranks differ in their number of targets
    return tokens, targets


def train_step(engine: Engine, step: int, *, accumulation: int, max_norm: float = 0.5, poison: bool = False) -> Any:
    """(global mean loss, gradient norm) of one step."""
    tokens, targets = batch_of(step)
    count = (targets != -100).sum()
    share = GLOBAL_BATCH // engine.world_size
    own = slice(engine.rank * share, (engine.rank + 1) * share)
    micro = share // accumulation
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-2 * (1 + math.cos(step / 7)) / 2
    total = torch.zeros(1, dtype=torch.float64)
    for index in range(accumulation):
        part = slice(index * micro, (index + 1) * micro)
        loss = engine.model(tokens[own][part], targets[own][part])
        total += loss.detach().double()
        if poison and engine.rank == engine.world_size - 1:
            loss = loss * float("nan")
        engine.backward(loss / count, last=index == accumulation - 1)
    norm = engine.step(max_norm)
    return engine.all_reduce_sum(total).item() / count.item(), float(norm)


def run_steps(engine: Engine, first: int, last: int, *, accumulation: int) -> list[Any]:
    return [train_step(engine, step, accumulation=accumulation) for step in range(first, last)]


def weights(engine: Engine) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in engine.portable_state()}


def moments(engine: Engine) -> list[Any]:
    """Every number an optimizer keeps on this rank."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found = []
    for state in optimizer.state.values():
        for value in state.values():
            local = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
            found.append(local.clone().flatten().tolist())
    return found


# -- what the processes run ------------------------------------------------------------------------------------------


def losses_of(options: dict[str, Any], steps: int, accumulation: int, dropout: float = 0.0) -> Any:
    rng.seed_all(0, place().rank)
    engine = make_engine(EngineConfig(**options), dropout=dropout)
    history = run_steps(engine, 0, steps, accumulation=accumulation)
    return history, weights(engine)


def losses_of_all(runs: list[tuple[dict[str, Any], int, int]]) -> list[Any]:
    """Several runs in one process each: starting processes costs more than these runs."""
    return [losses_of(*run) for run in runs]


def module_of(name: str) -> Any:
    return sys.modules[name]


def manager_of(directory: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(Path(directory) / "checkpoints", **options)
