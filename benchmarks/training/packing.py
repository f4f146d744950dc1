"""What unpadded batches save in fine-tuning: the same examples, one after the other and padded in two ways.

    python -P -m matmix.benchmarks packing RUN r8 --data.examples.train texts/r8/train.jsonl

RUN and the task are those of `matmix finetune`, whose other options it takes, too. "concat" puts all texts of a
micro-batch one after the other, "document" pads them to the longest one, "rows" to data.seqlen. A step is the forward
and the backward pass of a micro-batch with weights from the seed. All three take the same examples in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator

from torch import nn

from matmix.benchmarks.measuring.timing import Clock
from matmix.data.loading.batch import Batch
from matmix.model import build_model, initialize
from matmix.train.config import RunConfig
from matmix.train.loaders import make_loader, with_data_facts
from matmix.train.process.distributed import choose_device
from matmix.train.tasks import Task
from matmix.use.finetuning import finetuning_config

PACKINGS = ("concat", "document", "rows")


def measure(config: RunConfig, batches: int) -> dict[str, dict[str, float]]:
    """Packing -> "padding", the share of positions that hold no token, and "seconds" of a step, the mean over
    `batches` micro-batches."""
    config = with_data_facts(config, make_loader(config, "train", 0, 1))
    task, device = config.task(), choose_device(config.device, 0)
    clock = Clock(device)
    model = build_model(config.model, device=device)
    initialize(model, config.seed)
    loaders = {name: _batches(config, name, batches) for name in PACKINGS}
    tokens, positions, seconds = (dict.fromkeys(PACKINGS, 0) for _ in range(3))
    for number, group in enumerate(zip(*loaders.values(), strict=True)):
        for name, batch in zip(PACKINGS, group, strict=True):
            moved = batch.to(device)
            if number == 0:
                _step(task, model, moved)  # warms up
            seconds[name] += clock.seconds(lambda moved=moved: _step(task, model, moved))[0]
            tokens[name] += batch.n_tokens
            positions[name] += batch.inputs.numel()
    assert len(set(tokens.values())) == 1, "all packings hold the same texts"
    return {
        name: {"padding": 1 - tokens[name] / positions[name], "seconds": seconds[name] / batches} for name in PACKINGS
    }


def _batches(config: RunConfig, packing: str, batches: int) -> Iterator[Batch]:
    examples = dataclasses.replace(config.data.examples, truncate=True)
    data = dataclasses.replace(config.data, packing=packing, examples=examples, workers=0)
    return itertools.islice(make_loader(dataclasses.replace(config, data=data), "train", 0, 1), batches)


def _step(task: Task, model: nn.Module, batch: Batch) -> None:
    task.loss(model, batch).total.backward()
    model.zero_grad()


def main(arguments: list[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -P -m matmix.benchmarks packing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="run or export")
    parser.add_argument("task", help="task or recipe, as for matmix finetune")
    parser.add_argument("--batches", type=int, default=30, help="micro-batches (default: 30)")
    options, overrides = parser.parse_known_args(arguments)
    if options.batches < 1:
        raise ValueError(f"--batches must be 1 or more, got {options.batches}")
    config = finetuning_config(options.source, options.task, overrides, from_scratch=True)
    found = measure(config, options.batches)
    print(f"{options.batches} micro-batches of {config.micro_batch_size or config.global_batch_size} examples")
    for name, row in found.items():
        ratio = row["seconds"] / found["concat"]["seconds"]
        print(f"  {name:<10}{row['padding']:7.1%} padding{row['seconds'] * 1e3:9.1f} ms a step{ratio:7.2f} x concat")
