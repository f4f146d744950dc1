"""Evaluations of the average of the weights: the same metrics, found in the same way, under names of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from matmix.train.tasks.base import Metric

PREFIX = "ema_"
TITLE = "averaged weights"


def as_averaged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics that were found with the averaged weights, by the names that records have for them."""
    return {PREFIX + name: value for name, value in metrics.items()}


def of_averaged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of an evaluation's metrics that are of the averaged weights, by their usual names; {} where there are
    none."""
    return {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}


def averaged_metrics(known: Iterable[Metric]) -> list[Metric]:
    """What evaluations find of the averaged weights where they find the `known` metrics."""
    return [
        dataclasses.replace(metric, name=PREFIX + metric.name, title=f"{metric.title} of the {TITLE}")
        for metric in known
    ]
