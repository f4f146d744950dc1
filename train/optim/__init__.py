"""Optimizers, the rules of parameters, and learning-rate schedules."""

from matmix.train.arguments import find_part
from matmix.train.optim.adamw import AdamW
from matmix.train.optim.base import Optimizer
from matmix.train.optim.muon import Muon

__all__ = ["FALLBACK", "OPTIMIZERS", "Optimizer", "optimizer_class"]

OPTIMIZERS: dict[str, type[Optimizer] | str] = {
    "adamw": AdamW,
    "adamw_8bit": "matmix.train.optim.adamw_8bit:AdamW8bit",
    "muon": Muon,
    "stable_adamw": "matmix.train.optim.stable_adamw:StableAdamW",
    "lion": "matmix.train.optim.lion:Lion",
    "adafactor": "matmix.train.optim.adafactor:Adafactor",
    "soap": "matmix.train.optim.soap:SOAP",
}
"""By the names that recipes say; as text where a run that uses others should not spend seconds on its library."""
FALLBACK = "adamw"
"""The optimizer of the parameters that the run's does not take."""


def optimizer_class(name: str) -> type[Optimizer]:
    """Returns the optimizer of this name, or your own of "my_package.module:Name". Raises ValueError (one line) where
    there is none, or where it does not say what it keeps."""
    kind = find_part(name, OPTIMIZERS, "optimizer", Optimizer)
    kind = find_part(kind, {}, "optimizer", Optimizer) if isinstance(kind, str) else kind
    if kind.new_state is Optimizer.new_state:
        raise ValueError(f"optimizer {name!r} does not say what it keeps of each parameter: it has no method new_state")
    return kind
