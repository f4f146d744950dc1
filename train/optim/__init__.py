"""Optimizers, the rules of parameters, and learning-rate schedules."""

from matmix.train.arguments import find_part
from matmix.train.optim.adamw import AdamW
from matmix.train.optim.base import Optimizer
from matmix.train.optim.muon import Muon

__all__ = ["FALLBACK", "OPTIMIZERS", "Optimizer", "optimizer_class"]

OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon}
"""By the names that recipes say."""
FALLBACK = "adamw"
"""The optimizer of the parameters that the run's does not take."""


def optimizer_class(name: str) -> type[Optimizer]:
    """Returns the optimizer of this name, or your own of "my_package.module:Name". Raises ValueError (one line) where
    there is none, or where it does not say what it keeps."""
    kind = find_part(name, OPTIMIZERS, "optimizer", Optimizer)
    if kind.new_state is Optimizer.new_state:
        raise ValueError(f"optimizer {name!r} does not say what it keeps of each parameter: it has no method new_state")
    return kind
