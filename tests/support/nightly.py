"""What of a test's cases runs every time, and what only at night (marked `slow`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def nightly(*values: Any, condition: bool = True) -> Any:
    """A case of `pytest.mark.parametrize` that runs only at night; always, where `condition` is false."""
    return pytest.param(*values, marks=pytest.mark.slow if condition else ())


def each_value_once(*dimensions: Sequence[Any]) -> list[Any]:
    """All combinations of the dimensions' values, as cases. Those that always run hold each value at least once: the
    first of each dimension together, then the second, and so on, shorter dimensions from the start again."""
    longest = max(len(values) for values in dimensions)
    often = [tuple(index % len(values) for values in dimensions) for index in range(longest)]
    return [
        nightly(*(values[at] for values, at in zip(dimensions, case, strict=True)), condition=case not in often)
        for case in itertools.product(*(range(len(values)) for values in dimensions))
    ]
