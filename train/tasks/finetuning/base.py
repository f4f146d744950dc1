"""Holds what the tasks on labelled examples share: their loader, their targets, and scores of all predictions of a
split."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from matmix.data.config import DataConfig
from matmix.data.examples.base import Examples
from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.model.architecture import Outputs
from matmix.train.tasks.base import Costs, Loss, Metric, Predicted, Task


class ExampleTask(Task):
    """A task on labelled examples. A subclass says what the examples are, the cost of the model's outputs, what it
    predicts from them, and how predictions are scored."""

    modalities = ("examples",)
    target_share = 0.0
    examples: ClassVar[type[Examples]]
    has_classes: ClassVar[bool] = False
    """Its outputs are classes that the data names."""
    stands_for: ClassVar[Outputs] = Outputs()
    """What its outputs stand for, but for the names of classes."""
    made_up: ClassVar[tuple[int, Any]] = (1, 0)
    """Documents and label of an example in an `example_batch`."""

    def asks(self, split: str) -> dict[str, type[Examples]]:
        return {"kind": self.examples}

    def count_targets(self, batch: Batch) -> int:
        """Counts the labels that are there; an example with several values counts once."""
        return int(labelled(batch.labels).sum())

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        """Returns the sums of a micro-batch from the model's outputs, float32."""
        raise NotImplementedError

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        """Returns the predictions of the model by the number of the example."""
        raise NotImplementedError

    def scores(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        """Returns the metrics of the predictions of a split: arrays in the order of the examples, each of them once."""
        raise NotImplementedError

    def constants(self, values: np.ndarray, labels: np.ndarray) -> Iterable[np.ndarray]:
        """Yields predictions that look at no example, each in the form of one of `values`, of which the best by each
        metric is its control; labels: those that there are."""
        return ()

    def control(self, predicted: Predicted, examples: Examples) -> dict[str, float]:
        """Returns the best scores of one prediction for all examples, by the metrics that have a control."""
        best: dict[str, float] = {}
        for constant in self.constants(*with_labels(predicted)):
            same = np.broadcast_to(constant, predicted.values.shape)
            scores = self.scores(predicted._replace(values=same), examples)
            for metric in self.metrics:
                if metric.control and (value := scores.get(metric.name)) is not None:
                    better = max if metric.higher_is_better else min
                    best[metric.name] = better(value, best.get(metric.name, value))
        return best

    def prediction_rows(self, predicted: Predicted, examples: Examples) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields what a file of predictions has of a split: the number of each example's row, from 0 on, and JSON
        values: under "predicted" what stands under "label" in a file of examples, "label" itself, None where there is
        none, and what else there is to say. predicted: as of `scores`, but labels may be missing."""
        for number, value, label in each(predicted):
            yield number, self.row(value, label, examples)

    def row(self, value: Any, label: Any, examples: Examples) -> dict[str, Any]:
        """Returns the JSON values of one prediction, from numbers and lists of them."""
        return {"predicted": value, "label": label}

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self.cost(self.forward(model, batch).float(), batch)

    @torch.no_grad()
    def costs(self, model: nn.Module, batch: Batch) -> Costs:
        outputs = self.forward(model, batch).float()
        _, loss, sums = self.cost(outputs, batch)
        sums = {name: value.reshape(1) for name, value in sums.items()}
        return Costs(loss.reshape(1), sums, self.predictions(outputs, batch))

    def example_batch(self, inputs: Tensor) -> Batch:
        documents, label = self.made_up
        batch = super().example_batch(inputs.repeat_interleave(documents, 0))
        batch.labels = torch.tensor([label] * len(inputs))
        batch.examples = torch.arange(len(batch.inputs))
        return batch

    def outputs(self, data: DataConfig) -> Outputs:
        names = self.modality(data).class_names(data, kind=self.examples) if self.has_classes else ()
        return replace(self.stands_for, labels=names)


def labelled(labels: Tensor) -> Tensor:
    """Returns bool (n,): which labels are there."""
    there = ~labels.isnan() if labels.is_floating_point() else labels != IGNORED
    return there.flatten(1).all(1) if there.dim() > 1 else there


def each(predicted: Predicted) -> Iterator[tuple[int, Any, Any]]:
    """Yields number, value and label of each prediction, as numbers and lists of them; None = no label."""
    there = labelled(torch.from_numpy(predicted.labels)).tolist()
    for number, value, label, known in zip(*(array.tolist() for array in predicted), there, strict=True):
        yield number, value, label if known else None


def with_labels(predicted: Predicted) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values and labels of those that have a label."""
    kept = labelled(torch.from_numpy(predicted.labels)).numpy()
    return predicted.values[kept], predicted.labels[kept]


CALIBRATION = Metric(name="calibration_error", title="expected calibration error")
MOST_FREQUENT = "the most frequent class"
_BINS = 15


@dataclass(frozen=True, slots=True)
class ClassOptions:
    label_smoothing: float = 0.0
    """Share of the target's probability that is spread over all classes (arXiv 1512.00567)."""
    class_weights: tuple[float, ...] = ()
    """What an example of each class counts in training, in the order of the classes; empty = 1 each. The sum over the
    examples is divided by their number, so weights whose mean over the examples is 1 leave the learning rate alone."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        check_weights(self.class_weights)


def check_weights(weights: Sequence[float]) -> None:
    """Raises ValueError (one line) for a weight below 0."""
    if any(weight < 0 for weight in weights):
        raise ValueError(f"class_weights must be 0 or more, got {weights}")


def weights_like(weights: Sequence[float], logits: Tensor) -> Tensor | None:
    """Returns (classes,): the weights of the classes that logits (n, classes) stand for; None where none are given.
    Raises ValueError (one line) for another number of them."""
    if not weights:
        return None
    if len(weights) != logits.shape[1]:
        raise ValueError(f"objective.options.class_weights has {len(weights)} numbers for {logits.shape[1]} classes")
    return logits.new_tensor(weights)


def class_cost(logits: Tensor, labels: Tensor, options: ClassOptions) -> Loss:
    """Returns the cross-entropy of logits (n, classes) and labels (n,): with weights and smoothing to train on, without
    them to report, and how many are predicted right."""
    options_of_all = {"ignore_index": IGNORED, "reduction": "sum"}
    plain = total = F.cross_entropy(logits, labels, **options_of_all)
    if options.label_smoothing or options.class_weights:
        weights, smoothing = weights_like(options.class_weights, logits), options.label_smoothing
        total = F.cross_entropy(logits, labels, weight=weights, label_smoothing=smoothing, **options_of_all)
    return Loss(total, plain.detach(), {"accuracy": (logits.argmax(1) == labels).sum().float()})


def most_frequent(labels: np.ndarray) -> int:
    """Returns the class that most of the labels (n,) are."""
    return int(np.bincount(labels).argmax())


def calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Returns the expected calibration error of probabilities (n, classes) for labels (n,): how far accuracy and
    confidence are apart, by 15 bins of confidence of equal width, weighted by their numbers of predictions (arXiv
    1706.04599)."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, right.astype(float) - confidence, _BINS)
    return float(np.abs(gaps).sum() / len(labels))
