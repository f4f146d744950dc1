"""What a step of a deep model takes, from the record of one with few layers: equal layers add equal parts to it."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from matmix.train.config import RunConfig


def shallow(config: RunConfig, every: int = 1) -> tuple[RunConfig, int, int]:
    """Returns a config with few layers, how many make a period in which they repeat, and how many periods it lacks.
    every: only each layer of so many recomputes its activations."""
    period = math.lcm(len(config.model.layers), every)
    least = 3 * period + 1  # two inner periods, which are compared, and what stands beside them
    missing = max(0, (config.model.n_layers - least) // period)
    model = dataclasses.replace(config.model, n_layers=config.model.n_layers - missing * period)
    return dataclasses.replace(config, model=model), period, missing


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What living tensors and counts add up to while a step runs."""

    sums: np.ndarray
    """(ops, quantities): after each op, the bytes of activations and temporaries first."""
    turn: int
    """The first op of the backward pass."""
    kept: int
    """Bytes that live between the two passes."""
    forward: Mapping[int, int]
    """Layer -> the op with which its forward pass begins."""
    backward: Mapping[int, int]
    """Layer -> the op with which its first gradient is complete."""


def deepened(record: Record, period: int, missing: int) -> tuple[np.ndarray, int] | None:
    """Returns `sums` and `kept` of a record with `missing` periods of layers more than that of a model with few; None
    where two periods of that are not alike or not to be told apart, so that nothing is known of more."""
    sums = record.sums
    marks = [record.forward.get(count * period) for count in (1, 2, 3)]
    marks += [record.backward.get(count * period) for count in (3, 2, 1)]
    if None in marks:  # a layer without gradients of its own, as where layers share their weights
        return None
    first, second, third, there, inner, last = marks
    if not _alike(sums, first, second, third) or not _alike(sums, there, inner, last):
        return None
    grown, shrunk = sums[second] - sums[first], sums[last] - sums[inner]
    # Between the passes autocast drops its copies of weights: what stays of a layer is what its backward pass frees.
    before = missing * grown
    after = np.concatenate([-missing * shrunk[:1], before[1:]])
    parts = [
        sums[:second],
        *(sums[first:second] + count * grown for count in range(1, missing + 1)),
        sums[second : record.turn] + before,
        sums[record.turn : inner] + after,
        *(sums[inner:last] + after + count * shrunk for count in range(missing)),
        sums[inner:] + after + missing * shrunk,
    ]
    return np.concatenate(parts), record.kept + int(after[0])


def _alike(sums: np.ndarray, first: int, second: int, third: int) -> bool:
    """Returns True where what the ops from the first to the second add is repeated from there to the third."""
    one, other = sums[first : second + 1], sums[second : third + 1]
    return one.shape == other.shape and bool(np.all(other - one == sums[second] - sums[first]))
