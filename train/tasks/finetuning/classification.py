"""Classes, choices and values of texts and of pairs of texts: one for each, or any number."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from matmix.data.config import DataConfig
from matmix.data.examples.base import Examples, name_of
from matmix.data.examples.texts import Choices, ClassTexts, MultiLabelTexts, ValueTexts
from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.model.architecture import Outputs
from matmix.train.tasks.base import Loss, Metric, Predicted
from matmix.train.tasks.finetuning import base
from matmix.train.tasks.metrics import share

_ONE_CLASS = "one class for all"
_SAME_CLASSES = "the same classes for all"


class SequenceClassification(base.ExampleTask):
    """One class for each text or pair of texts."""

    architectures = ("sequence_classifier",)
    examples = ClassTexts
    has_classes = True
    stands_for = Outputs(problem_type="single_label_classification")
    Options = base.ClassOptions
    recorded = ("accuracy",)
    metrics = (
        share("accuracy", "accuracy", base.MOST_FREQUENT),
        share("f1", "F1", _ONE_CLASS),
        Metric(name="matthews", title="Matthews correlation", higher_is_better=True, digits=3, control=_ONE_CLASS),
        base.CALIBRATION,
    )

    def make_loader(self, data: DataConfig, *, split: str, **options: Any) -> Loader:
        """Raises ValueError (one line) for training examples that all have the same label."""
        loader = super().make_loader(data, split=split, **options)
        if split == "train":
            labels = loader.facts.examples.training_labels
            if len(found := {name_of(label) for label in labels}) == 1:
                raise ValueError(
                    f'{data.examples.train}: all {len(labels):,} training examples have the label "{found.pop()}": '
                    "there is nothing to learn"
                )
        return loader

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        return base.class_cost(outputs, batch.labels, self.options)

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        return Predicted(batch.examples, outputs.softmax(1), batch.labels)

    def scores(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        """Returns the metrics. F1 is that of the second of two classes, of more the mean over the classes."""
        from sklearn import metrics

        values, labels = base.with_labels(predicted)
        predictions = values.argmax(1)
        one = len(np.union1d(labels, predictions)) == 1  # scikit-learn's correlation is 0 too, and warns
        several = {"average": "macro", "labels": range(values.shape[1])} if values.shape[1] > 2 else {}
        return {
            "accuracy": float(metrics.accuracy_score(labels, predictions)),
            "f1": float(metrics.f1_score(labels, predictions, zero_division=0, **several)),
            "matthews": 0.0 if one else float(metrics.matthews_corrcoef(labels, predictions)),
            "calibration_error": base.calibration_error(values, labels),
        }

    def constants(self, values: np.ndarray, labels: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the most frequent class; of two also the second, whose F1 is that of the metric."""
        classes = np.eye(values.shape[1])
        yield classes[base.most_frequent(labels)]
        if len(classes) == 2:
            yield classes[1]

    def row(self, value: Any, label: Any, examples: Examples) -> dict[str, Any]:
        """Returns names of classes, and the probability of each under "values"."""
        names = examples.classes.names
        known = None if label is None else names[label]
        return {"predicted": names[int(np.argmax(value))], "label": known, "values": value}


@dataclass(frozen=True, slots=True)
class MultiLabelOptions:
    threshold: float = 0.5
    """A class is predicted from this probability on."""
    class_weights: tuple[float, ...] = ()
    """What an example that has a class counts for it in training, in the order of the classes; one that lacks it counts
    1. Empty = 1 each. Weights above 1 make rare classes be found more often."""

    def __post_init__(self) -> None:
        base.check_weights(self.class_weights)


class MultiLabel(base.ExampleTask):
    """Any number of classes for each text or pair of texts."""

    architectures = ("sequence_classifier",)
    examples = MultiLabelTexts
    has_classes = True
    stands_for = Outputs(problem_type="multi_label_classification")
    made_up = (1, [0.0])
    Options = MultiLabelOptions
    loss_metric = Metric(name="loss", title="loss", unit="nats per example")
    metrics = (
        share("f1_micro", "F1 over all labels", _SAME_CLASSES),
        share("f1_macro", "mean F1 of the classes", _SAME_CLASSES),
        share("accuracy", "all labels right", _SAME_CLASSES),
    )

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        """With weights to train on, without them to report."""
        kept, labels = base.labelled(batch.labels)[:, None], batch.labels.nan_to_num()

        def summed(weights: Tensor | None) -> Tensor:
            costs = F.binary_cross_entropy_with_logits(outputs, labels, pos_weight=weights, reduction="none")
            return (costs * kept).sum()

        weights, plain = base.weights_like(self.options.class_weights, outputs), summed(None)
        return Loss(plain if weights is None else summed(weights), plain.detach(), {})

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        return Predicted(batch.examples, outputs.sigmoid(), batch.labels)

    def scores(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        from sklearn import metrics

        values, labels = base.with_labels(predicted)
        predictions, labels = values >= self.options.threshold, labels > 0
        return {
            "f1_micro": float(metrics.f1_score(labels, predictions, average="micro", zero_division=0)),
            "f1_macro": float(metrics.f1_score(labels, predictions, average="macro", zero_division=0)),
            "accuracy": float(metrics.accuracy_score(labels, predictions)),
        }

    def constants(self, values: np.ndarray, labels: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the best of each metric: the set of classes that most examples have; as many of the most frequent
        classes as give the largest F1 over all labels; and all classes, whose mean F1 no fewer ones reach."""
        given, counts = np.unique(labels > 0, axis=0, return_counts=True)
        yield given[counts.argmax()].astype(float)
        frequencies = (labels > 0).sum(0)
        order = np.argsort(-frequencies, kind="stable")
        f1 = 2 * np.cumsum(frequencies[order]) / (len(labels) * np.arange(1, len(order) + 1) + frequencies.sum())
        yield np.isin(np.arange(len(order)), order[: f1.argmax() + 1]).astype(float)
        yield np.ones(len(order))

    def row(self, value: Any, label: Any, examples: Examples) -> dict[str, Any]:
        """Returns lists of names of classes, and the probability of each class under "values"."""
        names = examples.classes.names
        given = np.array(value, np.float32) >= self.options.threshold
        known = None if label is None else list(compress(names, label))
        return {"predicted": list(compress(names, given)), "label": known, "values": value}


class Regression(base.ExampleTask):
    """The mean squared error of the values of each example."""

    architectures = ("sequence_classifier",)
    examples = ValueTexts
    stands_for = Outputs(problem_type="regression")
    made_up = (1, [0.0])
    loss_metric = Metric(name="loss", title="loss", unit="squared error")
    metrics = (
        Metric(name="pearson", title="Pearson correlation", higher_is_better=True, digits=3),
        Metric(name="spearman", title="Spearman correlation", higher_is_better=True, digits=3),
        Metric(name="rmse", title="root mean squared error", control="the mean for all"),
    )

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        errors = (outputs - batch.labels.nan_to_num()).square().mean(1)
        total = (errors * base.labelled(batch.labels)).sum()
        return Loss(total, total.detach(), {})

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        return Predicted(batch.examples, outputs, batch.labels)

    def scores(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        """Returns the means over the values of an example."""
        from sklearn import metrics

        values, labels = base.with_labels(predicted)
        error = metrics.root_mean_squared_error(labels.astype(np.float64), values.astype(np.float64))
        return {**correlations(values, labels), "rmse": float(error)}

    def constants(self, values: np.ndarray, labels: np.ndarray) -> Iterator[np.ndarray]:
        yield labels.mean(0, dtype=np.float64)

    def prediction_rows(self, predicted: Predicted, examples: ValueTexts) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields numbers, or lists of them where an example has several."""
        for number, values in zip(predicted.numbers.tolist(), predicted.values.tolist(), strict=True):
            row = {"predicted": values, "label": examples.values(number)}
            yield number, {name: one[0] if one and len(one) == 1 else one for name, one in row.items()}


def correlations(values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns mean correlations of (n, k) values with their labels over k; 0 where all values are the same."""
    from scipy import stats

    def correlation(measure, column: int) -> float:
        x, y = values[:, column], labels[:, column]
        return float(measure(x, y).statistic) if len(x) > 1 and np.ptp(x) and np.ptp(y) else 0.0

    columns = range(values.shape[1])
    return {
        "pearson": float(np.mean([correlation(stats.pearsonr, column) for column in columns])),
        "spearman": float(np.mean([correlation(stats.spearmanr, column) for column in columns])),
    }


class MultipleChoice(SequenceClassification):
    """Each choice is a document with one output; the cross-entropy is that over the choices of an example."""

    examples = Choices
    has_classes = False
    stands_for = Outputs(multiple_choice=True)
    made_up = (2, 0)
    metrics = (share("accuracy", "accuracy", "the same choice for all"), base.CALIBRATION)

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        return super().cost(outputs.view(len(batch.labels), -1), batch)

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        logits = outputs.view(len(batch.labels), -1)
        return super().predictions(logits, batch)._replace(numbers=batch.examples[:: logits.shape[1]])

    def scores(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        scores = super().scores(predicted, examples)
        return {metric.name: scores[metric.name] for metric in self.metrics}

    def row(self, value: Any, label: Any, examples: Examples) -> dict[str, Any]:
        """Returns numbers of choices from 0 on, and the probability of each under "values"."""
        return {"predicted": int(np.argmax(value)), "label": label, "values": value}
