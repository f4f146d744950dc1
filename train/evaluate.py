"""Evaluation on the validation split: every token once, the same result for any number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

from matmix.data.loader import Loader
from matmix.train.config import RunConfig
from matmix.train.engine.base import Engine
from matmix.train.heartbeat import beat
from matmix.train.lengths import chance_accuracy
from matmix.train.objectives import compute_loss, count_targets


@torch.no_grad()
def evaluate(
    engine: Engine, loader: Loader, config: RunConfig, interrupted: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Mean loss (nats per target), perplexity, and accuracy of masked tokens or bits per byte; for a generated task the
    accuracy of a constant guess instead of the latter.

    loader: a one-pass loader that gives each rank the same number of micro-batches (rows without data have no
    targets), so that sharded models can gather their weights together.
    interrupted: asked before each micro-batch; where it is true on any rank, the result is None on all.
    """
    engine.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    limit = config.evaluation.batches * loader.micro_batches_per_step or None
    loader.samples = 0
    for batch in itertools.islice(loader, limit):
        beat("a batch of the evaluation")
        if engine.all_reduce_sum(torch.tensor(float(interrupted()), device=engine.device)).item():
            engine.train()
            return None
        targets = count_targets(batch)
        loss = compute_loss(engine.model, batch.to(engine.device, non_blocking=True), config.objective)
        sums += torch.tensor([loss.loss.item(), loss.correct.item(), float(targets)], dtype=torch.float64)
    engine.train()
    total, correct, count = engine.all_reduce_sum(sums.to(engine.device)).tolist()
    if count == 0:
        raise ValueError("the validation split holds no target to evaluate; prepare more validation data")
    loss = total / count
    metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    if config.objective.name == "masked_lm":
        metrics["masked_accuracy"] = correct / count
    else:
        metrics["accuracy"] = correct / count
    if config.data.synthetic.task:
        metrics |= {"accuracy": correct / count, "chance_accuracy": chance_accuracy(loader)}
    elif config.objective.name == "causal_lm":
        metrics["bits_per_byte"] = loss / math.log(2) / loader.bytes_per_target
    return metrics
