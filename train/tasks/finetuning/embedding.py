"""Vectors of texts that belong together come close, those of others do not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from matmix.data.examples.base import Examples
from matmix.data.examples.texts import TextPairs
from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.train.engine.mesh import Mesh
from matmix.train.tasks.base import Loss, Metric, Predicted
from matmix.train.tasks.finetuning.base import ExampleTask
from matmix.train.tasks.finetuning.classification import correlations
from matmix.train.tasks.metrics import share


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    temperature: float = 0.05
    """Divides the cosines before the softmax."""


class Embedding(ExampleTask):
    """The second text of a pair is to have the largest cosine with the first one among all second texts of a
    micro-batch, over all ranks (in-batch negatives, arXiv 1705.00652). The sum over a global batch depends on how many
    examples are seen together: micro_batch_size times the number of ranks. In evaluations they are those of one rank,
    and pair_accuracy and reciprocal_rank are over all texts."""

    architectures = ("text_embedder",)
    examples = TextPairs
    made_up = (2, 0)
    Options = EmbeddingOptions
    recorded = ("in_batch_accuracy",)
    metrics = (
        share("pair_accuracy", "nearest text is the right one", "chance"),
        Metric(name="reciprocal_rank", title="mean reciprocal rank", higher_is_better=True, digits=3, control="chance"),
        Metric(name="spearman", title="Spearman correlation", higher_is_better=True, digits=3),
        share("in_batch_accuracy", "right among the batch's texts"),
    )

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        vectors = F.normalize(outputs, dim=1)
        others, first = vectors[1::2], 0
        if self.mesh.data_size > 1 and vectors.requires_grad:
            # With gradients the ranks see their second texts together, each its own behind those of ranks before it.
            others, first = _Gather.apply(others, self.mesh), self.mesh.data_rank * len(batch.labels)
        cosines = vectors[::2] @ others.t() / self.options.temperature
        if len(others) == len(batch.labels):  # what fills up the last batch is no example to be told from others
            cosines = cosines.masked_fill(batch.labels == IGNORED, torch.finfo(cosines.dtype).min)
        targets = torch.arange(first, first + len(batch.labels), device=outputs.device)
        targets = targets.where(batch.labels != IGNORED, torch.full_like(targets, IGNORED))
        total = F.cross_entropy(cosines, targets, ignore_index=IGNORED, reduction="sum")
        return Loss(total, total.detach(), {"in_batch_accuracy": (cosines.argmax(1) == targets).sum().float()})

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        """Returns both vectors of an example, one after the other."""
        vectors = F.normalize(outputs, dim=1)
        return Predicted(batch.examples[::2], vectors.view(len(batch.labels), -1), batch.labels)

    def scores(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        """Looks for each text among all second texts; where pairs have a label, correlates it with their cosine."""
        from sklearn import metrics

        first, second = _both(predicted)
        if (similarities := examples.similarities) is not None:
            cosines, labels = (first * second).sum(1, keepdims=True), np.array(similarities)[predicted.numbers, None]
            return {"spearman": correlations(cosines, labels)["spearman"]}
        right, cosines = np.arange(len(first)), first @ second.T
        return {
            "pair_accuracy": float(metrics.accuracy_score(right, cosines.argmax(1))),
            "reciprocal_rank": float(metrics.label_ranking_average_precision_score(np.eye(len(first)), cosines)),
        }

    def control(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        """Returns the scores of a random order of the second texts; of correlations there is no control."""
        if examples.similarities is not None:
            return {}
        count = len(predicted.numbers)
        return {"pair_accuracy": 1 / count, "reciprocal_rank": float(np.mean(1 / np.arange(1, count + 1)))}

    def prediction_rows(self, predicted: Predicted, examples: Examples) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the cosine of both texts, and their vectors, of length 1, under "vectors"."""
        labels = examples.similarities
        for number, first, second in zip(predicted.numbers.tolist(), *_both(predicted), strict=True):
            row = {"predicted": float(first @ second), "label": None if labels is None else labels[number]}
            yield number, {**row, "vectors": [first.tolist(), second.tolist()]}


def _both(predicted: Predicted) -> list[np.ndarray]:
    """Returns the vectors of the first and of the second texts."""
    return np.split(predicted.values.astype(np.float64), 2, axis=1)


class _Gather(torch.autograd.Function):
    """The rows of all ranks with data of their own, in order; gradients go back to the rank that a row is from."""

    @staticmethod
    def forward(ctx, rows: Tensor, mesh: Mesh) -> Tensor:
        ctx.rows, ctx.mesh = len(rows), mesh
        gathered = rows.new_empty(mesh.data_size * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=mesh.data_group)
        return gathered

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.mesh.data_group)
        return gradient[ctx.mesh.data_rank * ctx.rows :][: ctx.rows], None
