"""Measures the benefit of mixing: compares the model's loss with that of the model whose mixers give the same output
for every token, or every patch."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.model.blocks import Block
from matmix.train.config import RunConfig
from matmix.train.engine.base import Engine
from matmix.train.evaluators.base import Evaluation, Evaluator
from matmix.train.evaluators.context import NOTHING, finite
from matmix.train.tasks.base import Metric, Task
from matmix.train.tasks.finetuning.base import labelled
from matmix.train.tasks.image_classification import ImageClassification
from matmix.train.tasks.token_prediction import TokenPrediction


class MixingGain(Evaluator):
    """`mixing_metrics` of the first global batches of the validation split."""

    metrics = (Metric(name="mixing_gain", title="mixing gain", unit="nats", higher_is_better=True, digits=3),)

    @classmethod
    def applies(cls, config: RunConfig, task: Task) -> bool:
        # A layer over sources has no position with a target, of which the mean would be.
        measurable = isinstance(task, TokenPrediction | ImageClassification) and not config.model.model_class.separated
        return measurable and config.evaluation.ablation_batches > 0

    def finish(self, evaluation: Evaluation) -> dict[str, float]:
        options = self.config.evaluation
        limit = min(options.ablation_batches, options.batches or options.ablation_batches)
        batches = evaluation.batches
        return mixing_metrics(evaluation.engine, self.task, lambda: map(evaluation.on_device, batches(limit)))

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        gain = metrics.get("mixing_gain")
        if gain is None or isinstance(self.task, TokenPrediction):
            return []  # `context_words` says it with the context's gain
        if gain < NOTHING:
            return [
                "Warning: the mixers contribute nothing: constants in their place change the loss by "
                f"{gain:+.3f} nats per image."
            ]
        return [f"With the mixers' outputs replaced by their means the loss is {gain:.2f} nats per image higher."]


@torch.no_grad()
def mixing_metrics(engine: Engine, task: Task, batches: Callable[[], Iterable[Batch]]) -> dict[str, float]:
    """Returns `loss_without_mixing`, the mean loss with the output of every mixer replaced by its mean, and
    `mixing_gain`, by how much that is above the loss of the model as it is, on the same batches. To be called on all
    ranks.

    batches: gives this rank's micro-batches, on its device, each time it is called; as many on every rank.

    The means are taken in a pass before, by layer and channel, over the positions of all ranks that have a target:
    where nothing is mixed, no other position has a say in the loss. Of an image with a target these are all; each patch
    then tells what it does by itself, and a class token nothing. Nothing is measured of models without mixers, on
    batches without targets, and where the result is no finite number.
    """
    blocks = [block for block in engine.module.blocks if block.mixer is not None]
    if not blocks:
        return {}
    outputs = torch.zeros(len(blocks), engine.module.config.d_model, dtype=torch.float64, device=engine.device)
    predicting = torch.empty(0, dtype=torch.int64)
    images = engine.module.per_document

    def noted(place: int, mix: Callable[..., Tensor], x: Tensor, *documents: Any) -> Tensor:
        y = mix(x, *documents)
        rows = y.sum(1, dtype=torch.float64) / y.shape[1] if images else y.flatten(0, 1)
        outputs[place] += rows[predicting].sum(0, dtype=torch.float64)
        return y

    count = torch.zeros(1, dtype=torch.float64, device=engine.device)
    loss, ablated, asked = torch.zeros_like(count), torch.zeros_like(count), torch.zeros_like(count)
    with mixing_replaced(blocks, noted):
        for batch in batches():
            predicting = labelled(batch.labels).nonzero().squeeze(1) if images else _predicting(batch)
            count += predicting.numel()
            asked += predicting.numel() if batch.weights is None else (batch.weights > 0).sum()
            loss += task.costs(engine.model, batch).loss.sum(dtype=torch.float64)
    sums = engine.sum_over_batches(torch.cat([outputs.flatten(), count]))
    means = (sums[:-1] / sums[-1].clamp(min=1)).view_as(outputs)

    with mixing_replaced(blocks, lambda place, mix, x, *documents: means[place].to(x.dtype).expand_as(x)):
        for batch in batches():
            ablated += task.costs(engine.model, batch).loss.sum(dtype=torch.float64)
    loss_sum, ablated_sum, targets = engine.sum_over_batches(torch.cat([loss, ablated, asked])).tolist()
    if targets == 0:
        return {}
    without = ablated_sum / targets
    return finite({"loss_without_mixing": without, "mixing_gain": without - loss_sum / targets})


@contextlib.contextmanager
def mixing_replaced(blocks: Sequence[Block], replacement: Callable[..., Tensor]) -> Iterator[None]:
    """Within, the i-th block adds replacement(i, mix, x, cu_seqlens, max_seqlen) to the stream, where mix is
    its own way. Blocks run as they are written, not compiled: they would be compiled again for each replacement."""
    forwards = [vars(block).get("forward") for block in blocks]
    try:
        for place, block in enumerate(blocks):
            block.mix = functools.partial(replacement, place, block.mix)
            block.forward = functools.partial(Block.forward, block)
        yield
    finally:
        for block, forward in zip(blocks, forwards, strict=True):
            del block.mix, block.forward
            if forward is not None:
                block.forward = forward


def _predicting(batch: Batch) -> Tensor:
    """Returns int64 (n,): the tokens that have a target, among those that blocks see, which is no padding."""
    targets = batch.labels.flatten() != IGNORED
    if batch.attention_mask is not None:
        targets = targets[batch.attention_mask.flatten()]
    return targets.nonzero().squeeze(1)
