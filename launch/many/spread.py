"""Mean and deviation over runs that differ in their seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence


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
