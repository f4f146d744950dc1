"""Classes of images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.data.labels import IGNORED
from matmix.data.loading.batch import Batch
from matmix.train.tasks.base import Loss, Metric, Task


class ImageClassification(Task):
    """The cross-entropy of the classes of images, given as numbers or as shares of all classes."""

    architectures = ("image_classifier",)
    recorded = ("accuracy",)
    loss_metric = Metric(name="loss", title="loss", unit="nats per image")
    metrics = (Metric(name="accuracy", title="accuracy", unit="%", higher_is_better=True, digits=1),)

    @property
    def target_share(self) -> float:
        return 0.0  # the model knows that it has one output for each image

    def count_targets(self, batch: Batch) -> int:
        return int(labelled_images(batch.labels).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        logits, labels = self.forward(model, batch).float(), batch.labels
        there = labelled_images(labels)
        soft = labels.is_floating_point()
        targets = labels.nan_to_num() if soft else labels
        costs = F.cross_entropy(logits, targets, reduction="none", **({} if soft else {"ignore_index": IGNORED}))
        total = (costs * there).sum()
        right = (logits.argmax(1) == (targets.argmax(1) if soft else targets)) & there
        return Loss(total, total.detach(), {"accuracy": right.sum()})

    def example_batch(self, inputs: Tensor) -> Batch:
        batch = super().example_batch(inputs)
        batch.labels, batch.n_tokens = torch.zeros(len(inputs), dtype=torch.long), len(inputs)
        return batch


def labelled_images(labels: Tensor) -> Tensor:
    """bool (B,): which images have a target; labels (B,) of classes, or (B, classes) of shares."""
    return ~labels.isnan().any(1) if labels.is_floating_point() else labels != IGNORED
