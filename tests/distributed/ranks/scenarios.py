"""A small model and a training run on it, for the processes of these tests.

Kept apart from the tests so that a child process imports this file and what it runs, and not pytest.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import re
import resource
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from messages import Heard
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from matmix.train.checkpoint import save as generators
from matmix.train.checkpoint.manager import CheckpointManager
from matmix.train.engine.base import Engine
from matmix.train.engine.build import build_engine
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.sharded_files import ShardedFiles
from matmix.train.optim import FALLBACK, optimizer_class
from matmix.train.optim.adamw import AdamW
from matmix.train.optim.base import SeveralOptimizers, full_shape, whole_tensor
from matmix.train.optim.config import OptimizerConfig
from matmix.train.process.distributed import Distributed, agree, complaint, from_rank_zero, gather_objects

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
        {"params": [(name, p) for name, p in model.named_parameters() if decays(p)], "weight_decay": 0.3},
        {"params": [(name, p) for name, p in model.named_parameters() if not decays(p)], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


CLIPS = {"up": 0.02, "rates": 1e-4, "norms": 0.0}
"""Clipping groups of `make_ruled_optimizer` beside the others, and their limits."""


def make_ruled_optimizer(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    """Rates and clipping by rules; one group is smaller than the number of ranks can be, one is not clipped, and one
    clipping group spreads over two groups of the optimizer. kind: of optimizer."""
    options = {
        ("up", "weight"): {"lr_factor": 0.3, "weight_decay": 0.3},
        ("up", "bias"): {"lr_factor": 0.3, "weight_decay": 0.0},
        ("rates", "A_log"): {"lr_factor": 2.0, "weight_decay": 0.0},
        ("norms", ""): {"weight_decay": 0.0},
        ("others", ""): {"weight_decay": 0.3},
    }
    members: dict[tuple[str, str], list[tuple[str, nn.Parameter]]] = {key: [] for key in options}
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if ".up." in name:
            members["up", last].append((name, parameter))
        elif last == "A_log":
            members["rates", last].append((name, parameter))
        else:
            members["norms" if "norm" in name else "others", ""].append((name, parameter))
    groups = [
        {"params": members[key], "clip_group": key[0], "clip": CLIPS.get(key[0], 0.0), **options[key]}
        for key in options
    ]
    parts: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        taken: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group["params"]:
            own = kind if optimizer_class(kind).takes(name, full_shape(parameter)) else FALLBACK
            taken.setdefault(own, []).append((name, parameter))
        for own, params in taken.items():
            parts.setdefault(own, []).append({**group, "params": params, "optimizer": own})
    made = {
        own: optimizer_class(own).from_config(its, OptimizerConfig(lr=1e-2), optimizer_class(own).Options())
        for own, its in parts.items()
    }
    return made[kind] if len(made) == 1 else SeveralOptimizers(made, [one for its in parts.values() for one in its])


def place() -> Distributed:
    return Distributed.from_environment("cpu")


def make_engine(
    config: EngineConfig,
    *,
    layers: int = 3,
    dropout: float = 0.0,
    meta: bool = True,
    ruled: bool = True,
    optimizer: str = "adamw",
) -> Engine:
    engine = build_engine(config, place())
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = Toy(layers, dropout)
    ruled_optimizer = functools.partial(make_ruled_optimizer, kind=optimizer)
    engine.prepare(model, initialize, ruled_optimizer if ruled else make_optimizer)
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
    first, end = (rank * GLOBAL_BATCH // engine.world_size for rank in (engine.rank, engine.rank + 1))
    own, micro = slice(first, end), (end - first) // accumulation
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-2 * (1 + math.cos(step / 7)) / 2 * group.get("lr_factor", 1.0)
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


@torch.no_grad()
def evaluate(engine: Engine) -> float:
    engine.eval()
    loss = engine.model(*batch_of(10_000)).item()
    engine.train()
    return loss


@torch.no_grad()
def full_weights(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and full value (on the CPU) of each parameter and persistent buffer, on every rank."""
    for name, tensor in engine.named_tensors():
        if hasattr(tensor, "ds_id"):  # cut by DeepSpeed at stage 3
            with engine.deepspeed.zero.GatheredParameters([tensor]):
                yield name, tensor.detach().to("cpu", copy=True)
        else:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield name, full.detach().to("cpu", copy=True)


def weights(engine: Engine) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in full_weights(engine)}


def moments(engine: Engine) -> list[Any]:
    """Every number an optimizer keeps on this rank."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found = []
    for state in optimizer.state.values():
        for value in state.values():
            local = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
            found.append(local.clone().flatten().tolist())
    return found


# -- what the processes run ------------------------------------------------------------------------------

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"name": "fsdp2"},
    "ddp": {"name": "ddp"},
    **{f"zero{stage}": {"name": "deepspeed", "zero_stage": stage} for stage in range(4)},
}
OFFLOADED = {f"zero{n}, offload": {"name": "deepspeed", "zero_stage": n, "offload": True} for n in (1, 2, 3)}


def losses_of(options: dict[str, Any], steps: int, accumulation: int, optimizer: str = "adamw") -> Any:
    """(history of (loss, norm), final weights and last norms of clipping groups) of an uninterrupted run with rules for
    parameters."""
    partition_everything()
    engine = make_engine(EngineConfig(**options), optimizer=optimizer)
    if options.get("offload"):  # on a CPU nothing else shows it
        assert getattr(engine.optimizer, "cpu_offload", False) or engine.optimizer.offload_optimizer
    history = run_steps(engine, 0, steps, accumulation=accumulation)
    norms = {f"norm of {name}": [float(norm)] for name, norm in engine.clip_norms.items()}
    return history, weights(engine) | norms


def same_gradients(
    options: dict[str, Any], first: int, last: int, optimizer: str, directory: str
) -> dict[str, tuple[list[float], list[float]]]:
    """Weights, and what the optimizer keeps of them, after steps with the same gradients, over the ranks and whole, by
    name. Over the ranks they go on from the checkpoint of step `first`, and end with one."""
    engine, manager = make_engine(EngineConfig(**options), optimizer=optimizer), CheckpointManager(Path(directory))
    if first:
        manager.load(manager.path(first), engine)
    whole = Toy()
    initialize(whole)
    alone = make_ruled_optimizer(whole, optimizer)
    spread = dict(engine.module.named_parameters())
    for step in range(last):
        torch.manual_seed(step)
        for name, parameter in whole.named_parameters():
            own, parameter.grad = spread[name], torch.randn_like(parameter)
            own.grad = parameter.grad.clone()
            if isinstance(own, DTensor):
                own.grad = distribute_tensor(parameter.grad, own.device_mesh, own.placements, src_data_rank=None)
        alone.step()
        if step >= first:
            engine.optimizer.step()
    manager.save(last, engine, {})
    files = ShardedFiles(manager.path(last), engine.layout()).files_for(dict(engine.named_tensors()))
    assert {int(re.search(r"__(\d+)_", file)[1]) for file in files} == {0, engine.rank}, "it wants what others hold"
    found = {}
    for name, one in whole.named_parameters():
        ours, theirs = engine.optimizer.state[spread[name]], alone.state[one]
        pairs = {name: (spread[name], one), **{f"{name}.{entry}": (ours[entry], theirs[entry]) for entry in theirs}}
        for key, pair in pairs.items():
            found[key] = tuple(whole_tensor(tensor.detach()).flatten().tolist() for tensor in pair)
    return found


def losses_of_all(runs: list[tuple]) -> list[Any]:
    """Several runs in one set of processes: starting those costs more than these runs. They leave torch as it was."""
    found = [losses_of(*run) for run in runs]
    assert F.linear is torch._C._nn.linear
    return found


def partition_everything() -> None:
    """DeepSpeed would leave tensors as small as these whole at stage 3."""
    from matmix.train.engine import zero

    zero.ZERO_OPTIONS["stage3_param_persistence_threshold"] = 0


def engine_of(case: str, dropout: float = 0.0) -> Engine:
    """case: a name of `ENGINES` or `OFFLOADED`, and maybe an optimizer, as in "fsdp2 by lion"."""
    name, _, optimizer = case.partition(" by ")
    return make_engine(EngineConfig(**{**ENGINES, **OFFLOADED}[name]), dropout=dropout, optimizer=optimizer or "adamw")


def stop_and_resume(case: str, directory: str, *, dropout: float, stop: int, steps: int, accumulation: int) -> Any:
    """Runs to `steps`, with a checkpoint at `stop`; then again from there. (losses, losses from `stop` on
    again)."""
    partition_everything()
    manager = CheckpointManager(Path(directory) / case)
    generators.seed_all(5, place().rank)
    engine = engine_of(case, dropout)
    history = run_steps(engine, 0, stop, accumulation=accumulation)
    evaluate(engine)  # leaves some weights gathered on some engines
    assert manager.save(stop, engine, {"data": {"samples": 7}}) == manager.path(stop)
    assert manager.has(stop)
    assert not manager.has(stop + 1)
    at_stop = weights(engine)
    history += run_steps(engine, stop, steps, accumulation=accumulation)
    generators.seed_all(99, place().rank)
    again = engine_of(case, dropout)
    assert manager.load(manager.latest_valid(), again) == {"data": {"samples": 7}}
    assert weights(again) == at_stop
    return history, run_steps(again, stop, steps, accumulation=accumulation)


def stop_and_resume_all(names: list[str], directory: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: stop_and_resume(name, directory, **options) for name in names}


def resume_all(names: list[str], directory: str, stop: int, steps: int, accumulation: int) -> dict[str, Any]:
    """Goes on from the checkpoints of `stop_and_resume`, with the number of ranks at hand."""
    partition_everything()
    found = {}
    for name in names:
        engine = engine_of(name)
        manager = CheckpointManager(Path(directory) / name)
        manager.load(manager.latest_valid(), engine)
        found[name] = run_steps(engine, stop, steps, accumulation=accumulation)
        assert [p.name for p in manager.store.directory.iterdir()] == [manager.path(stop).name]
    return found


def poison_and_discard(name: str) -> Any:
    """A run with bad steps and dropped gradients in between; compared with one without them."""
    partition_everything()
    config = EngineConfig(**{**ENGINES, **OFFLOADED}[name])
    clean = run_steps(make_engine(config), 0, 4, accumulation=2)
    engine = make_engine(config)
    history = run_steps(engine, 0, 2, accumulation=2)
    before = weights(engine), moments(engine)
    for _ in range(2):
        _, norm = train_step(engine, 2, accumulation=2, poison=True)
        assert not math.isfinite(norm), norm
        assert (weights(engine), moments(engine)) == before
    history += run_steps(engine, 2, 4, accumulation=2)
    return clean, history


def poison_and_discard_all(names: list[str]) -> dict[str, Any]:
    return {name: poison_and_discard(name) for name in names}


def full_disk(name: str, directory: str) -> dict[str, Any]:
    """Saves that fail on one rank only, in two ways, between saves that work."""
    engine = make_engine(EngineConfig(**ENGINES[name]))
    manager = CheckpointManager(Path(directory) / name, keep_last=2)
    faulty_rank = 0 if name == "zero0" else engine.world_size - 1  # at stage 0 only rank 0 has something to write
    told = Heard()
    saved, listings = [], []
    take = engine.snapshot
    for step, fault in enumerate((None, no_space_at_sync, small_file_limit, None), start=1):
        train_step(engine, step, accumulation=1)

        def faulty_snapshot(copy: bool, fault: Any = fault) -> Any:
            snapshot = take(copy=copy)
            write = snapshot.write

            def faulty_write(*arguments: Any) -> None:
                with fault() if fault and engine.rank == faulty_rank else contextlib.nullcontext():
                    write(*arguments)

            snapshot.write = faulty_write
            return snapshot

        engine.snapshot = faulty_snapshot
        saved.append(manager.save(step, engine, {"step": step}) is not None)
        engine.all_reduce_sum(torch.zeros(1))  # the ranks are still in step with each other
        listings.append(sorted(path.name for path in manager.store.directory.iterdir()))
    again = make_engine(EngineConfig(**ENGINES[name]))
    assert manager.load(manager.latest_valid(), again) == {"step": 4}
    assert weights(again) == weights(engine)
    return {"saved": saved, "told": list(told), "listings": listings, "faulty_rank": faulty_rank}


def full_disk_all(names: list[str], directory: str) -> dict[str, Any]:
    return {name: full_disk(name, directory) for name in names}


@contextlib.contextmanager
def no_space_at_sync() -> Any:
    """The disk is found to be full when the data reach it, as with a quota or a network file system."""

    def fail(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sync, os.fsync = os.fsync, fail
    try:
        yield
    finally:
        os.fsync = sync


@contextlib.contextmanager
def small_file_limit() -> Any:
    """The kernel refuses the writes themselves, in the middle of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def resume_with_another_layout(directory: str) -> dict[Any, Any]:
    partition_everything()
    found = {}
    pairs = [("ddp", "fsdp2"), ("fsdp2", "ddp"), ("zero0", "zero3"), ("zero1", "zero2"), ("zero2", "zero0")]
    pairs += [("zero3", "zero1"), ("zero2", "zero2, offload"), ("zero1, offload", "zero3, offload")]
    engines = {**ENGINES, **OFFLOADED}
    for saved, resumed in [*pairs, ("zero3, offload", "zero1")]:
        manager = CheckpointManager(Path(directory) / f"{saved}-{resumed}")
        engine = make_engine(EngineConfig(**engines[saved]))
        run_steps(engine, 0, 2, accumulation=1)
        manager.save(2, engine, {})
        expected = run_steps(engine, 2, 4, accumulation=1)
        again = make_engine(EngineConfig(**engines[resumed]))
        manager.load(manager.path(2), again)
        found[saved, resumed] = expected, run_steps(again, 2, 4, accumulation=1)
    return found


def agreements() -> Any:
    rank = place().rank

    def disk() -> None:
        if rank == 1:
            raise OSError("disk of rank 1")

    def bug() -> None:
        if rank == 1:
            raise KeyError("a bug")

    try:
        agree(bug)
    except (RuntimeError, KeyError) as error:
        mistake = str(error) if rank == 0 else f"rank 1 failed: {error!r}"
    try:
        agree(disk)
    except OSError as error:
        failure = complaint(error)
    first = agree(lambda: f"only {rank}", here=rank == 0)
    total = make_engine(EngineConfig()).all_reduce_sum(torch.tensor(1.0 + rank)).item()
    return from_rank_zero(f"from {rank}"), gather_objects(rank), failure, mistake, first, total


def fail_on_rank_one() -> None:
    if place().rank == 1:
        raise ValueError("only here")


def train_recipes(runs: list[tuple[str, list[str]]]) -> None:
    partition_everything()
    from matmix.train.loop import train
    from matmix.train.recipe import load_config

    for recipe, overrides in runs:
        train(load_config(recipe, overrides))
