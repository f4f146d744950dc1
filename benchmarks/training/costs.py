"""What the trainer costs: its steps against a bare loop, what an evaluation spends on asking whether context is used,
what comparing the copies of a replicated model takes, and the data loader against what the steps consume.

    python -P -m matmix.benchmarks costs mru_shakespeare --steps 60

The bare loop has the same model, optimizer, batch shapes and loss, and nothing else: no engine, callbacks, counting,
schedule, NaN guard or data loading (its batches lie in memory). Both run in one process, in turns of a few steps, so
that whatever else the machine does hits both alike; the ratio of the medians is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch

from matmix.model import build_model, initialize
from matmix.train.config import RunConfig
from matmix.train.evaluators import evaluate
from matmix.train.evaluators.ablation import mixing_metrics
from matmix.train.evaluators.context import position_sums
from matmix.train.guards.replicas import fingerprint
from matmix.train.loaders import make_loader
from matmix.train.loop import Trainer
from matmix.train.optim.groups import make_optimizer
from matmix.train.process.distributed import Distributed
from matmix.train.recipe import load_config

_TURN = 5  # steps of one turn


@contextlib.contextmanager
def _trainer(config: RunConfig) -> Iterator[Trainer]:
    """A trainer of this config that writes to a folder which is then removed."""
    with tempfile.TemporaryDirectory() as folder, Distributed.from_environment(config.device) as distributed:
        config = dataclasses.replace(config, run_dir=folder, steps=10**9, stop_step=0)
        config = dataclasses.replace(config, logging=dataclasses.replace(config.logging, progress=False))
        trainer = Trainer(config, distributed)
        trainer.stop_agreed = False
        yield trainer


def measure_overhead(config: RunConfig, steps: int) -> dict[str, float]:
    """Median seconds of a trainer's step and of a bare step, and the trainer's overhead as a share."""
    with _trainer(config) as trainer:
        config = trainer.config
        trainer.call("on_start")
        batches = iter(trainer.loader)
        device = trainer.engine.device
        model = build_model(config.model, device=device)
        initialize(model, config.seed)
        optimizer = make_optimizer(model, config.optimizer, config.data.seqlen)
        kept = [next(batches).to(device) for _ in range(trainer.accumulation * 4)]
        position = 0

        def bare_step() -> None:
            nonlocal position
            group = [kept[(position + index) % len(kept)] for index in range(trainer.accumulation)]
            position += trainer.accumulation
            targets = sum(map(trainer.task.count_targets, group))
            for batch in group:
                (trainer.task.loss(model, batch).total / targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

        def timed(step) -> float:
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        ours: list[float] = []
        bare: list[float] = []
        for turn in range(max(steps // _TURN, 2) + 1):
            ours_turn = [timed(lambda: trainer.train_step(batches)) for _ in range(_TURN)]
            bare_turn = [timed(bare_step) for _ in range(_TURN)]
            if turn:  # the first turn warms up
                ours += ours_turn
                bare += bare_turn
        trainer.call("on_end")
    ours_median, bare_median = statistics.median(ours), statistics.median(bare)
    return {
        "trainer_seconds_per_step": ours_median,
        "bare_seconds_per_step": bare_median,
        "overhead": ours_median / bare_median - 1,
        "tokens_per_second": config.global_batch_size * config.data.seqlen / ours_median,
    }


def measure_context(config: RunConfig) -> dict[str, float]:
    """Seconds of an evaluation of the whole validation split, and those of it that go to losses by position and to the
    loss without mixing (medians of 5). {} where the recipe measures none."""
    if not config.evaluation.ablation_batches:
        return {}
    with _trainer(config) as trainer:
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

        def seconds(measured: Callable[[], object]) -> float:
            began = time.perf_counter()
            measured()  # which ends with numbers on the host
            return time.perf_counter() - began

        parts = [by_position, lambda: mixing_metrics(engine, lambda: first)]
        context = [[seconds(part) for part in parts] for _ in range(6)][1:]  # the first warms up
        return {
            "evaluation_seconds": seconds(lambda: evaluate(evaluators, engine, trainer.task, config, loader)),
            "context_seconds": sum(map(statistics.median, zip(*context, strict=True))),
        }


def measure_replicas(config: RunConfig) -> dict[str, float]:
    """Seconds of the fingerprint of all weights and moments (median of 7), as each rank with a copy takes it."""
    with _trainer(config) as trainer:
        engine = trainer.engine
        trainer.call("on_start")
        trainer.train_step(iter(trainer.loader))  # so that there are moments

        def seconds() -> float:
            tensors = [tensor for _, tensor in (*engine.copied_tensors(), *engine.common_tensors())]
            began = time.perf_counter()
            fingerprint(tensors, engine.device).tolist()  # which ends with numbers on the host
            return time.perf_counter() - began

        return {"replica_check_seconds": statistics.median([seconds() for _ in range(8)][1:])}


def measure_data(config: RunConfig, batches: int) -> float:
    """Tokens per second of the training loader alone with one worker."""
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, workers=1))
    loader = make_loader(config, "train", 0, 1)
    stream = iter(loader)
    for _ in range(2 * config.data.prefetch + 2):  # what was read ahead while nobody waited does not count
        next(stream)
    began = time.perf_counter()
    tokens = sum(next(stream).n_tokens for _ in range(batches))
    return tokens / (time.perf_counter() - began)


def main(arguments: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -P -m matmix.benchmarks costs", description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=60, help="steps of each kind (default: 60)")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    options, overrides = parser.parse_known_args(arguments)
    config = load_config(options.recipe, overrides)
    numbers = measure_overhead(config, options.steps)
    numbers |= measure_context(config)
    numbers |= measure_replicas(config)
    numbers["data_tokens_per_second"] = measure_data(config, 200)
    numbers["data_over_training"] = numbers["data_tokens_per_second"] / numbers["tokens_per_second"]
    print(f"trainer  {numbers['trainer_seconds_per_step'] * 1e3:8.2f} ms a step")
    print(f"bare     {numbers['bare_seconds_per_step'] * 1e3:8.2f} ms a step; overhead {numbers['overhead']:+.1%}")
    print(f"training {numbers['tokens_per_second']:10,.0f} tokens/s")
    if "context_seconds" in numbers:
        every, context = config.evaluation.every or config.steps, numbers["context_seconds"]
        share = context / (every * numbers["trainer_seconds_per_step"])
        print(
            f"context  {context * 1e3:8.2f} ms of an evaluation's {numbers['evaluation_seconds'] * 1e3:,.0f} ms, "
            f"{share:.2%} of the {every} steps between two evaluations"
        )
    every, check = config.faults.replica_check_every, numbers["replica_check_seconds"]
    if every:
        share = check / (every * numbers["trainer_seconds_per_step"])
        print(f"copies   {check * 1e3:8.2f} ms to compare, {share:.3%} of the {every} steps between two comparisons")
    print(
        f"data     {numbers['data_tokens_per_second']:10,.0f} tokens/s with one worker: "
        f"{numbers['data_over_training']:.0f} x what training consumes"
    )
    if options.json:
        where = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        record = {"recipe": options.recipe, "date": date.today().isoformat(), **where, **numbers}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
