"""Rules for parameters that a module wants trained differently from others: factor on the learning rate, clipping,
weight decay and the optimizer itself; and what is in a matrix, for optimizers of whole matrices.

A module states them in a method `parameter_rules(seqlen)`, as it states initial values in `init_rules`: a dict from the
name of a parameter, relative to that module, to a `ParameterRule`.
"""

import math
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRule:
    """One rule, for one or several parameters. Raises ValueError (one line) for values that mean nothing."""

    lr: float = 1.0
    """Factor on the schedule's learning rate, and so on the whole step, weight decay included."""
    clip: float | None = None
    """The gradients of all parameters that share the rule, over all layers, are clipped together to this norm, apart
    from all others; None = with the others, to the norm of the run."""
    weight_decay: float | None = None
    """Weight decay in place of the run's; 0 = not decayed; None = the run's for matrices, none for vectors."""
    optimizer: str | None = None
    """The optimizer, by a name that optimizer.name may have; None = the run's."""
    blocks: tuple[int, ...] | None = None
    """Rows of the linear maps that a matrix holds one below the other, of which optimizers of whole matrices update
    each by itself; () = it holds none, and they leave it to another optimizer; None = it is one."""

    def __post_init__(self) -> None:
        if not (self.lr >= 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr = {self.lr}: a factor on the learning rate is a number from 0 on")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip = {self.clip}: a norm to clip to is a number above 0")
        if self.weight_decay is not None and not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay = {self.weight_decay}: must be a number from 0 on")
        if self.blocks is not None and min(self.blocks, default=1) < 1:
            raise ValueError(f"blocks = {self.blocks}: every linear map has rows")


NOT_DECAYED = ParameterRule(weight_decay=0.0, blocks=())
"""For rates, frequencies, states and functions: smaller weights are not a simpler layer but another one."""


def stated_rules(model: nn.Module, seqlen: int) -> dict[str, tuple[str, ParameterRule]]:
    """Full name of each parameter that a module of `model` has a rule for -> (who says so, the rule). The outermost
    module's rule wins.

    seqlen: length of the training sequences. Who: the mixer's name in configurations, or the class of a module that is
    part of none.
    Raises ValueError where a rule names a parameter that there is not.
    """
    names = {name for name, _ in model.named_parameters()}
    mixers: dict[str, str] = {}  # name of a module -> of the mixer that it is or is part of
    rules: dict[str, tuple[str, ParameterRule]] = {}
    for prefix, module in model.named_modules():
        mixers[prefix] = getattr(module, "name", "") or mixers.get(prefix.rpartition(".")[0], "")
        if not hasattr(module, "parameter_rules"):
            continue
        owner = mixers[prefix] or type(module).__name__
        for name, rule in module.parameter_rules(seqlen).items():
            full = f"{prefix}.{name}" if prefix else name
            if full not in names:
                raise ValueError(f"parameter_rules of {owner}: there is no parameter {name}")
            rules.setdefault(full, (owner, rule))
    return rules
