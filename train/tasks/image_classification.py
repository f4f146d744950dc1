"""Classes of images: one for each image, or shares of several, as mixing and smoothing make them."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.data.config import DataConfig
from matmix.data.loading.batch import Batch, image_batch
from matmix.data.loading.loader import Loader
from matmix.model.architecture import Outputs
from matmix.train.tasks.base import Costs, Loss, Metric, Predicted, Task
from matmix.train.tasks.finetuning.base import MOST_FREQUENT, labelled
from matmix.train.tasks.metrics import as_controls, share

_TOP = 5


class ImageClassification(Task):
    """The cross-entropy of the classes of images. Labels are int64 (B,), -100 = none, or shares of the classes, float32
    (B, classes), NaN = none; of shares the largest one counts as the right class."""

    architectures = ("image_classifier",)
    modalities = ("pictures",)
    target_share = 0.0
    recorded = ("accuracy", "top5")
    loss_metric = Metric(name="loss", title="loss", unit="nats per image")
    metrics = (
        share("accuracy", "top-1 accuracy", MOST_FREQUENT, digits=2),
        share("top5", "top-5 accuracy", "the five most frequent classes", digits=2),
    )

    def count_targets(self, batch: Batch) -> int:
        return int(labelled(batch.labels).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        costs = image_costs(self.forward(model, batch).float(), batch.labels)
        loss, *sums = (values.sum() for values in costs)
        return Loss(loss, loss.detach(), dict(zip(self.recorded, sums, strict=True)))

    @torch.no_grad()
    def costs(self, model: nn.Module, batch: Batch) -> Costs:
        """With the probabilities of the classes as predictions, where the batch says which images it has."""
        logits = self.forward(model, batch).float()
        loss, *others = image_costs(logits, batch.labels)
        predicted = Predicted(batch.examples, logits.softmax(1), batch.labels)
        known = batch.examples is not None
        return Costs(loss, dict(zip(self.recorded, others, strict=True)), predicted if known else None)

    def example_batch(self, inputs: Tensor) -> Batch:
        labels = torch.zeros(len(inputs), dtype=torch.long)
        return image_batch(inputs, labels, examples=torch.arange(len(inputs)))

    def measures(self, means: dict[str, float], loader: Loader) -> dict[str, float]:
        return means | as_controls(image_controls(loader.facts.class_counts))

    def outputs(self, data: DataConfig) -> Outputs:
        return Outputs(labels=self.modality(data).class_names(data), problem_type="single_label_classification")


def image_controls(counts: np.ndarray) -> dict[str, float]:
    """Returns the scores of the most frequent classes as the answer to all pictures; counts (classes,): the pictures of
    each. The score of five says nothing where there are no more, and is left out."""
    shares = np.sort(counts)[::-1] / counts.sum()
    scores = {"accuracy": float(shares[0]), "top5": float(shares[:_TOP].sum())}
    return scores if len(counts) > _TOP else {"accuracy": scores["accuracy"]}


def image_costs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns for each image the cross-entropy, whether the class is the likeliest, and whether it is one of the five
    likeliest: float32 (B,), 0 where there is no label. logits: float32 (B, classes); labels: as the task's."""
    there = labelled(labels)
    if labels.is_floating_point():
        shares = torch.where(there[:, None], labels, 0.0)
        loss, right = -(shares * logits.log_softmax(1)).sum(1), shares.argmax(1)
    else:
        right = torch.where(there, labels, 0)
        loss = F.cross_entropy(logits, right, reduction="none") * there
    likeliest = logits.detach().topk(min(_TOP, logits.shape[1]), dim=1).indices
    hits = (likeliest == right[:, None]) & there[:, None]
    return loss, hits[:, 0].float(), hits.any(1).float()
