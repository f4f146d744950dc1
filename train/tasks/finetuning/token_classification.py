"""Classes of words, such as parts of speech and names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from matmix.data.config import DataConfig
from matmix.data.examples.base import Examples
from matmix.data.examples.words import Words
from matmix.data.loading.batch import Batch
from matmix.data.loading.examples import class_names
from matmix.model.outputs import Outputs
from matmix.train.tasks.base import Loss, Metric, Predicted
from matmix.train.tasks.finetuning.base import ExampleTask, with_labels
from matmix.train.tasks.finetuning.classes import ClassOptions, class_cost
from matmix.train.tasks.finetuning.entities import entity_scores

_SHARE = {"unit": "%", "higher_is_better": True, "digits": 1}


@dataclass(frozen=True, slots=True)
class TokenClassOptions(ClassOptions):
    strict: bool = False
    """Count as entities what IOB2 allows only; otherwise as conlleval.pl does."""


class TokenClassification(ExampleTask):
    """One class for each word, predicted at its first token. Where the classes are O, B-... and I-... entities are
    scored, otherwise the mean F1 of the classes. Words that were cut off do not count."""

    architectures = ("token_classifier",)
    examples = Words
    Options = TokenClassOptions
    recorded = ("accuracy",)
    loss_metric = Metric(name="loss", title="loss", unit="nats per word")
    metrics = (
        Metric(name="entity_f1", title="entity F1", **_SHARE),
        Metric(name="accuracy", title="accuracy", **_SHARE),
        Metric(name="f1", title="mean F1 of the classes", **_SHARE),
    )

    @property
    def target_share(self) -> float:
        return 1.0

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        return class_cost(outputs, batch.labels, self.options)

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        return Predicted(batch.examples, outputs.argmax(1), batch.labels)

    def scores(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        from sklearn import metrics

        values, labels = with_labels(predicted)
        scores = {"accuracy": float(metrics.accuracy_score(labels, values))}
        names = np.array(examples.classes.names)
        if not any(name[:2] in ("B-", "I-") for name in names):
            f1 = metrics.f1_score(labels, values, average="macro", labels=range(len(names)), zero_division=0)
            return scores | {"f1": float(f1)}
        borders = np.flatnonzero(np.diff(predicted.numbers)) + 1
        sentences = (np.split(names[numbers], borders) for numbers in (predicted.labels, predicted.values))
        return scores | entity_scores(*(map(list, each) for each in sentences), strict=self.options.strict)

    def example_batch(self, inputs: Tensor) -> Batch:
        batch = super().example_batch(inputs)
        batch.labels = torch.zeros(inputs.numel(), dtype=torch.long)
        batch.select = batch.examples = torch.arange(inputs.numel())
        return batch

    def outputs(self, data: DataConfig) -> Outputs:
        return Outputs(labels=class_names(self.examples, data))
