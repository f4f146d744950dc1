"""Mean and deviation over runs that differ in their seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from matmix.train.tasks.base import Metric


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Mean, and sample standard deviation where there are several values."""

    mean: float
    deviation: float | None
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """None where there are no values. Where one is no finite number, neither is the mean, and there is no deviation."""
    if not values:
        return None
    several = len(values) > 1 and all(map(math.isfinite, values))
    return Spread(statistics.fmean(values), statistics.stdev(values) if several else None, len(values))


def mean_in_words(values: Sequence[float], digits: int, *, scale: float = 1) -> str:
    """As in "1.2345 ± 0.0012"; without a deviation where there is none, "" without values. scale: a factor."""
    found = spread([scale * value for value in values])
    if found is None:
        return ""
    text = f"{found.mean:.{digits}f}"
    return text if found.deviation is None else f"{text} ± {found.deviation:.{digits}f}"


def metric_in_words(values: Sequence[float], metric: Metric) -> str:
    """The same of a metric, shares in percent, as its heading says."""
    return mean_in_words(values, metric.digits, scale=100 if metric.unit == "%" else 1)
