"""The cost and the calibration of classes, shared by the tasks whose examples have one class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from matmix.data.labels import IGNORED
from matmix.train.tasks.base import Loss, Metric

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
    """(classes,): the weights of the classes that logits (n, classes) stand for; None where none are given.

    Raises ValueError (one line) for another number of them.
    """
    if not weights:
        return None
    if len(weights) != logits.shape[1]:
        raise ValueError(f"objective.options.class_weights has {len(weights)} numbers for {logits.shape[1]} classes")
    return logits.new_tensor(weights)


def class_cost(logits: Tensor, labels: Tensor, options: ClassOptions) -> Loss:
    """Cross-entropy of logits (n, classes) and labels (n,): with weights and smoothing to train on, without them to
    report, and how many are predicted right."""
    plain = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    total = plain
    if options.label_smoothing or options.class_weights:
        total = F.cross_entropy(
            logits,
            labels,
            weight=weights_like(options.class_weights, logits),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=options.label_smoothing,
        )
    return Loss(total, plain.detach(), {"accuracy": (logits.argmax(1) == labels).sum().float()})


def most_frequent(labels: np.ndarray) -> int:
    """The class that most of the labels (n,) are."""
    return int(np.bincount(labels).argmax())


def calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The expected calibration error of probabilities (n, classes) for labels (n,): how far accuracy and confidence are
    apart, by 15 bins of confidence of equal width, weighted by their numbers of predictions (arXiv 1706.04599)."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, right.astype(float) - confidence, _BINS)
    return float(np.abs(gaps).sum() / len(labels))
