"""`costs`: what the trainer costs beside the training steps of a recipe."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from matmix.benchmarks.measure import Clock
from matmix.benchmarks.report import save
from matmix.launch.lab.measuring import environment
from matmix.model import build_model, initialize
from matmix.train.arguments import Recipe
from matmix.train.config import RunConfig
from matmix.train.evaluators import Evaluation, evaluate
from matmix.train.evaluators.ablation import mixing_metrics
from matmix.train.evaluators.context import position_sums
from matmix.train.guards.replicas import fingerprint
from matmix.train.loaders import make_loader
from matmix.train.loop import Trainer
from matmix.train.optim.groups import make_optimizer
from matmix.train.process.distributed import Distributed
from matmix.train.recipe import load_config

WARM_UP = 5
"""Steps of each kind that do not count."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the trainer costs: its steps against a bare loop, what an evaluation spends on asking whether context is
    used, what comparing the copies of a replicated model takes, and the data loader against what the steps consume.

    The bare loop has the same model, optimizer, batch shapes and loss, and nothing else: no engine, callbacks,
    counting, schedule, NaN guard or data loading (its batches lie in memory). Both run in one process and take turns,
    so that whatever else the machine does hits both alike. A step of each, one after the other, is a pair; the overhead
    is the median of the pairs' differences, over the bare loop's median, with an interval of 95 % confidence.
    """

    recipe: Recipe = ""
    steps: int = 200
    """Steps of each kind."""
    json: Path | None = None
    """Also write the numbers here."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        config = load_config(self.recipe, rest)
        numbers = measure_overhead(config, self.steps) | measure_context(config) | measure_replicas(config)
        step, data = numbers["trainer_seconds_per_step"], measure_data(config, 200)
        numbers |= {"data_tokens_per_second": data, "data_over_training": data / numbers["tokens_per_second"]}
        print(f"trainer  {step * 1e3:8.2f} ms a step")
        interval = f"{numbers['overhead_low']:+.2%} to {numbers['overhead_high']:+.2%} (95 %, {self.steps} pairs)"
        print(f"bare     {numbers['bare_seconds_per_step'] * 1e3:8.2f} ms a step")
        print(f"overhead {numbers['overhead']:+8.2%}, {interval}")
        print(f"training {numbers['tokens_per_second']:10,.0f} tokens/s")
        if "context_seconds" in numbers:
            every, context = config.evaluation.every or config.steps, numbers["context_seconds"]
            print(
                f"context  {context * 1e3:8.2f} ms of an evaluation's {numbers['evaluation_seconds'] * 1e3:,.0f} ms, "
                f"{context / (every * step):.2%} of the {every} steps between two evaluations"
            )
        if every := config.faults.replica_check_every:
            check = numbers["replica_check_seconds"]
            share = f"{check / (every * step):.3%} of the {every} steps between two comparisons"
            print(f"copies   {check * 1e3:8.2f} ms to compare, {share}")
        print(f"data     {data:10,.0f} tokens/s with one worker: {numbers['data_over_training']:.0f} x training's")
        if self.json:
            save({"recipe": self.recipe, "environment": environment(), **numbers}, self.json)
        return 0


@contextlib.contextmanager
def _trainer(config: RunConfig) -> Iterator[tuple[Trainer, Callable[[Callable[[], Any]], float]]]:
    """Gives a trainer of this config that writes to a folder which is then removed, and what returns the seconds of a
    run, until the device has done it."""
    with tempfile.TemporaryDirectory() as folder, Distributed.from_environment(config.device) as distributed:
        config = replace(config, run_dir=folder, steps=10**9, stop_step=0)
        config = replace(config, logging=replace(config.logging, progress=False))
        trainer = Trainer(config, distributed)
        trainer.stop_agreed = False
        yield trainer, Clock(trainer.engine.device).wall_seconds


def measure_overhead(config: RunConfig, steps: int) -> dict[str, float]:
    """Returns median seconds of a trainer's step and of a bare step, and the trainer's overhead as a share, with its
    interval of confidence."""
    with _trainer(config) as (trainer, seconds):
        config, device = trainer.config, trainer.engine.device
        trainer.call("on_start")
        batches = iter(trainer.loader)
        model = build_model(config.model, device=device)
        initialize(model, config.seed)
        optimizer = make_optimizer(model, config.optimizer, config.data.seqlen)
        kept = itertools.cycle([next(batches).to(device) for _ in range(trainer.accumulation * 4)])

        def bare_step() -> None:
            group = list(itertools.islice(kept, trainer.accumulation))
            targets = sum(map(trainer.task.count_targets, group))
            for batch in group:
                (trainer.task.loss(model, batch).total / targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

        def trainer_step() -> None:
            trainer.train_step(batches)

        pairs = []
        for number in range(WARM_UP + steps):
            # Whichever comes second finds caches as the other left them.
            order = (trainer_step, bare_step) if number % 2 else (bare_step, trainer_step)
            pairs.append({step: seconds(step) for step in order})
        trainer.call("on_end")
    ours, bare = ([pair[step] for pair in pairs[WARM_UP:]] for step in (trainer_step, bare_step))
    low, middle, high = median_interval([one - other for one, other in zip(ours, bare, strict=True)])
    step = statistics.median(bare)
    return {
        "trainer_seconds_per_step": statistics.median(ours),
        "bare_seconds_per_step": step,
        "overhead": middle / step,
        "overhead_low": low / step,
        "overhead_high": high / step,
        "tokens_per_second": config.global_batch_size * config.data.seqlen / statistics.median(ours),
    }


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Returns the median of independent values, between the order statistics that hold theirs with a confidence of 95 %
    (the normal approximation of the binomial)."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = math.floor(len(values) / 2 - half), math.ceil(len(values) / 2 + half)
    return ordered[max(low, 0)], statistics.median(ordered), ordered[min(high, len(values) - 1)]


def measure_context(config: RunConfig) -> dict[str, float]:
    """Returns the seconds of an evaluation of the whole validation split, and those that go to losses by position and
    to the loss without mixing (medians of 5). {} where the recipe measures none."""
    if not config.evaluation.ablation_batches:
        return {}
    with _trainer(config) as (trainer, seconds):
        config, engine = trainer.config, trainer.engine
        loader = make_loader(config, "validation", 0, 1)
        evaluators = [evaluator for evaluator, every in trainer.evaluators if every]
        engine.eval()
        batches = [batch.to(engine.device) for batch in loader]
        first = batches[: config.evaluation.ablation_batches * loader.micro_batches_per_step]
        rows = [batch.labels.flatten() if batch.select is None else batch.select for batch in batches]
        losses = [torch.ones(row.numel(), device=engine.device) for row in rows]

        def by_position() -> None:
            sums = [position_sums(batch, loss, config.data.seqlen) for batch, loss in zip(batches, losses, strict=True)]
            torch.stack(sums).sum(0).cpu()

        evaluation = Evaluation(engine=engine, task=trainer.task, loader=loader)
        parts = [by_position, lambda: mixing_metrics(engine, trainer.task, lambda: first)]
        context = [[seconds(part) for part in parts] for _ in range(6)][1:]  # the first warms up
        return {
            "evaluation_seconds": seconds(lambda: evaluate(evaluators, evaluation, config)),
            "context_seconds": sum(map(statistics.median, zip(*context, strict=True))),
        }


def measure_replicas(config: RunConfig) -> dict[str, float]:
    """Returns the seconds of the fingerprint of all weights and moments (median of 7), as each rank takes it."""
    with _trainer(config) as (trainer, seconds):
        engine = trainer.engine
        trainer.call("on_start")
        trainer.train_step(iter(trainer.loader))  # so that there are moments
        tensors = [tensor for _, tensor in (*engine.copied_tensors(), *engine.common_tensors())]
        times = [seconds(lambda: fingerprint(tensors, engine.device).tolist()) for _ in range(8)]
        return {"replica_check_seconds": statistics.median(times[1:])}


def measure_data(config: RunConfig, batches: int) -> float:
    """Returns tokens per second of the training loader alone with one worker."""
    stream = iter(make_loader(replace(config, data=replace(config.data, workers=1)), "train", 0, 1))
    for _ in range(2 * config.data.prefetch + 2):  # what was read ahead while nobody waited does not count
        next(stream)
    began = time.perf_counter()
    tokens = sum(next(stream).n_tokens for _ in range(batches))
    return tokens / (time.perf_counter() - began)
