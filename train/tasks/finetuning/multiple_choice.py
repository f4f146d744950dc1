"""The right one of several ways to go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from matmix.data.config import DataConfig
from matmix.data.examples.base import Examples
from matmix.data.examples.texts import Choices
from matmix.data.loading.batch import Batch
from matmix.model.architecture import Outputs
from matmix.train.tasks.base import Loss, Predicted
from matmix.train.tasks.finetuning.base import (
    CALIBRATION,
    ClassOptions,
    ExampleTask,
    calibration_error,
    class_cost,
    each,
    most_frequent,
    with_labels,
)
from matmix.train.tasks.metrics import share


class MultipleChoice(ExampleTask):
    """Each choice is a document with one output; the cross-entropy is that over the choices of an example."""

    architectures = ("sequence_classifier",)
    examples = Choices
    Options = ClassOptions
    recorded = ("accuracy",)
    metrics = (share("accuracy", "accuracy", "the same choice for all"), CALIBRATION)

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        return class_cost(outputs.view(len(batch.labels), -1), batch.labels, self.options)

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        logits = outputs.view(len(batch.labels), -1)
        return Predicted(batch.examples[:: logits.shape[1]], logits.softmax(1), batch.labels)

    def scores(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        from sklearn import metrics

        values, labels = with_labels(predicted)
        return {
            "accuracy": float(metrics.accuracy_score(labels, values.argmax(1))),
            "calibration_error": calibration_error(values, labels),
        }

    def constants(self, values: np.ndarray, labels: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the choice that is right most often."""
        yield np.eye(values.shape[1])[most_frequent(labels)]

    def prediction_rows(self, predicted: Predicted, examples: Examples) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields numbers of choices from 0 on, and the probability of each under "values"."""
        for number, values, label in each(predicted):
            yield number, {"predicted": int(np.argmax(values)), "label": label, "values": values}

    def example_batch(self, inputs: Tensor) -> Batch:
        """Returns examples with two choices each."""
        batch = super().example_batch(inputs.repeat_interleave(2, 0))
        batch.labels = torch.zeros(len(inputs), dtype=torch.long)
        return batch

    def outputs(self, data: DataConfig) -> Outputs:
        return Outputs(multiple_choice=True)
