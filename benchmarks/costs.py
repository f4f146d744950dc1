"""`costs`: what the trainer costs beside the training steps of a recipe."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
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

TURN = 5
"""Steps of one turn."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the trainer costs: its steps against a bare loop, what an evaluation spends on asking whether context is
    used, what comparing the copies of a replicated model takes, and the data loader against what the steps consume.

    The bare loop has the same model, optimizer, batch shapes and loss, and nothing else: no engine, callbacks,
    counting, schedule, NaN guard or data loading (its batches lie in memory). Both run in one process, in turns of a
    few steps, so that whatever else the machine does hits both alike; the ratio of the medians is reported.
    """

    recipe: Recipe = ""
    steps: int = 60
    """Steps of each kind."""
    json: Path | None = None
    """Also write the numbers here."""

    def run(self, rest: list[str], typed: list[str]) -> int:
        config = load_config(self.recipe, rest)
        numbers = measure_overhead(config, self.steps) | measure_context(config) | measure_replicas(config)
        step, data = numbers["trainer_seconds_per_step"], measure_data(config, 200)
        numbers |= {"data_tokens_per_second": data, "data_over_training": data / numbers["tokens_per_second"]}
        print(f"trainer  {step * 1e3:8.2f} ms a step")
        print(f"bare     {numbers['bare_seconds_per_step'] * 1e3:8.2f} ms a step; overhead {numbers['overhead']:+.1%}")
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
    """Returns median seconds of a trainer's step and of a bare step, and the trainer's overhead as a share."""
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

        times: dict[Callable, list[float]] = {partial(trainer.train_step, batches): [], bare_step: []}
        for turn, (step, own) in itertools.product(range(max(steps // TURN, 2) + 1), times.items()):
            turned = [seconds(step) for _ in range(TURN)]
            own += turned if turn else []  # the first turn warms up
        trainer.call("on_end")
    ours, bare = map(statistics.median, times.values())
    tokens = config.global_batch_size * config.data.seqlen
    numbers = {"trainer_seconds_per_step": ours, "bare_seconds_per_step": bare}
    return numbers | {"overhead": ours / bare - 1, "tokens_per_second": tokens / ours}


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
