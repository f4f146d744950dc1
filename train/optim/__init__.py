"""Optimizers, the rules of parameters, and learning-rate schedules."""

from __future__ import annotations

from matmix.train.optim.adamw import AdamW
from matmix.train.optim.base import Optimizer
from matmix.train.optim.config import OptimizerConfig
from matmix.train.plugins import find_part

__all__ = ["OPTIMIZERS", "Optimizer", "optimizer_class"]

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
}
"""By the names that recipes say."""


def optimizer_class(config: OptimizerConfig) -> type[Optimizer]:
    """The optimizer that a config names. Raises ValueError (one line) where there is none of that name."""
    kind = find_part(config.name, OPTIMIZERS, "optimizer", Optimizer)
    if not hasattr(kind, "moments"):
        raise ValueError(f"optimizer {config.name!r} does not state its moments: what it keeps of each parameter")
    return kind
