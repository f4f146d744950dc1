"""The base class of optimizers: a torch optimizer that states what it keeps for each parameter."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import torch

from matmix.train.optim.config import OptimizerConfig
from matmix.train.plugins import NoOptions

OTHERS = "others"
"""The clipping group of the parameters that no rule clips apart."""


class Optimizer(torch.optim.Optimizer):
    """An optimizer that a recipe can name. Engines, checkpoints, conversions and estimates of memory go by the
    attributes below and know no optimizer by name.

    `param_groups` come with "lr", "weight_decay" and what engines and the loop need; `step` reads them and changes
    parameters in place. Parameters may be parts of the model's: sharded (DTensor), or flat under DeepSpeed.
    """

    moments: ClassVar[tuple[str, ...]]
    """Names of the entries of `self.state[parameter]` that are tensors in the parameter's shape, of float32."""
    counts: ClassVar[tuple[str, ...]] = ()
    """Names of its entries that are numbers, 0-dim tensors that are equal for parameters that were updated equally
    often."""
    elementwise: ClassVar[bool] = True
    """Whether the update of an element depends on no other element. DeepSpeed from ZeRO stage 1 on hands an optimizer
    flat pieces of several parameters, and takes none whose updates are not elementwise."""
    Options: ClassVar[type] = NoOptions
    """Frozen dataclass of its options in [optimizer.options]; every field has a default."""

    @classmethod
    def from_config(cls, groups: list[dict[str, Any]], config: OptimizerConfig, options: Any) -> Self:
        """The optimizer of a run; options: an instance of `Options`."""
        return cls(groups, lr=config.lr, **dataclasses.asdict(options))


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. To name that class means to import it, which takes half a second that a start on one
    process has no use for."""
    return hasattr(tensor, "to_local")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, sharded or not."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of the whole tensor, also under ZeRO-3, which leaves an empty tensor in its place."""
    return getattr(tensor, "ds_shape", tensor.shape)
