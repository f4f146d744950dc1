"""Evaluation on the validation split: every token once, the same result for any number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch

from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.train.config import RunConfig
from matmix.train.engine.base import Engine
from matmix.train.evaluators.ablation import mixing_metrics
from matmix.train.evaluators.context import position_metrics, position_sums
from matmix.train.evaluators.lengths import chance_accuracy
from matmix.train.process.heartbeat import beat
from matmix.train.tasks.objectives import count_targets, row_losses


class _Interrupted(Exception):
    pass


@torch.no_grad()
def evaluate(
    engine: Engine, loader: Loader, config: RunConfig, interrupted: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Mean loss (nats per target), perplexity, accuracy of masked tokens or bits per byte (for a generated task the
    accuracy of a constant guess), and what context bought: `position_metrics` of the split, `mixing_metrics` of its
    first global batches.

    loader: a one-pass loader that gives each rank the same number of micro-batches (rows without data have no
    targets), so that sharded models can gather their weights together.
    interrupted: asked before each micro-batch; where it is true on any rank, the result is None on all.
    """

    def walk(batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            beat("a batch of the evaluation")
            if engine.all_reduce_sum(torch.tensor(float(interrupted()), device=engine.device)).item():
                raise _Interrupted
            yield batch

    engine.eval()
    try:
        return _evaluate(engine, loader, config, walk)
    except _Interrupted:
        return None
    finally:
        engine.train()


def _evaluate(
    engine: Engine, loader: Loader, config: RunConfig, walk: Callable[[Iterable[Batch]], Iterator[Batch]]
) -> dict[str, float]:
    seqlen, steps = config.data.seqlen, loader.micro_batches_per_step
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
    by_position = torch.zeros(2, seqlen.bit_length(), dtype=torch.float64, device=engine.device)
    first: list[Batch] = []  # what mixing is measured on
    loader.samples = 0
    for batch in walk(itertools.islice(loader, config.evaluation.batches * steps or None)):
        if len(first) < config.evaluation.ablation_batches * steps:
            first.append(batch)
        targets, batch = count_targets(batch), batch.to(engine.device, non_blocking=True)
        rows = row_losses(engine.model, batch)
        sums[:2] += torch.stack([rows.loss.sum(), rows.correct.sum()]).double()
        sums[2] += targets
        by_position += position_sums(batch, rows.loss, seqlen)
    reduced = engine.all_reduce_sum(torch.cat([sums, by_position.flatten()]))
    total, correct, count = reduced[:3].tolist()
    if count == 0:
        raise ValueError("the validation split holds no target to evaluate; prepare more validation data")
    loss = total / count
    metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    masked = config.objective.name == "masked_lm"
    metrics["masked_accuracy" if masked else "accuracy"] = correct / count
    if config.data.synthetic.task:
        metrics |= {"accuracy": correct / count, "chance_accuracy": chance_accuracy(loader)}
    elif not masked:
        metrics["bits_per_byte"] = loss / math.log(2) / loader.bytes_per_target
    metrics |= position_metrics(reduced[3:].view_as(by_position), seqlen)
    if first:
        metrics |= mixing_metrics(engine, lambda: (batch.to(engine.device, non_blocking=True) for batch in walk(first)))
    return metrics
