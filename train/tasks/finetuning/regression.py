"""Values of texts and of pairs of texts, such as how similar two sentences are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from matmix.data.config import DataConfig
from matmix.data.examples.base import Examples
from matmix.data.examples.texts import ValueTexts
from matmix.data.loading.batch import Batch
from matmix.model.architecture import Outputs
from matmix.train.tasks.base import Loss, Metric, Predicted
from matmix.train.tasks.finetuning.base import ExampleTask, labelled, with_labels


class Regression(ExampleTask):
    """The mean squared error of the values of each example."""

    architectures = ("sequence_classifier",)
    examples = ValueTexts
    loss_metric = Metric(name="loss", title="loss", unit="squared error")
    metrics = (
        Metric(name="pearson", title="Pearson correlation", higher_is_better=True, digits=3),
        Metric(name="spearman", title="Spearman correlation", higher_is_better=True, digits=3),
        Metric(name="rmse", title="root mean squared error", control="the mean for all"),
    )

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        errors = (outputs - batch.labels.nan_to_num()).square().mean(1)
        total = (errors * labelled(batch.labels)).sum()
        return Loss(total, total.detach(), {})

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        return Predicted(batch.examples, outputs, batch.labels)

    def scores(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        """Means over the values of an example."""
        from sklearn import metrics

        values, labels = with_labels(predicted)
        error = metrics.root_mean_squared_error(labels.astype(np.float64), values.astype(np.float64))
        return {**correlations(values, labels), "rmse": float(error)}

    def constants(self, values: np.ndarray, labels: np.ndarray) -> Iterator[np.ndarray]:
        yield labels.mean(0, dtype=np.float64)

    def prediction_rows(self, predicted: Predicted, examples: ValueTexts) -> Iterator[tuple[int, dict[str, Any]]]:
        """Numbers, or lists of them where an example has several."""
        for number, values in zip(predicted.numbers.tolist(), predicted.values.tolist(), strict=True):
            found = {"predicted": values, "label": examples.values(number)}
            yield number, {name: one[0] if one and len(one) == 1 else one for name, one in found.items()}

    def example_batch(self, inputs: Tensor) -> Batch:
        batch = super().example_batch(inputs)
        batch.labels = batch.labels[:, None].float()
        return batch

    def outputs(self, data: DataConfig) -> Outputs:
        return Outputs(problem_type="regression")


def correlations(values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Pearson and Spearman correlation of (n, k) values with their labels, means over k; 0 where all values are the
    same, for which there is none."""
    from scipy import stats

    def correlation(measure, column: int) -> float:
        x, y = values[:, column], labels[:, column]
        return float(measure(x, y).statistic) if len(x) > 1 and np.ptp(x) and np.ptp(y) else 0.0

    columns = range(values.shape[1])
    return {
        "pearson": float(np.mean([correlation(stats.pearsonr, column) for column in columns])),
        "spearman": float(np.mean([correlation(stats.spearmanr, column) for column in columns])),
    }
