"""What the outputs of a classifier stand for: the model has numbers only, exports and reports have names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """What the outputs of a classifier stand for, as the task that trained it knows."""

    labels: tuple[str, ...] = ()
    """Names of the classes or values, in their order; () = LABEL_0, LABEL_1 and so on."""
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None
    """What transformers computes a sequence classifier's loss by."""
    multiple_choice: bool = False
    """A sequence classifier's one output is the score of a choice."""
