"""Lion (arXiv 2302.06675): steps are the signs of a momentum."""

import dataclasses
import inspect

import pytorch_optimizer
import torch

from matmix.train.errors import require
from matmix.train.optim.base import State
from matmix.train.optim.library import LibraryOptimizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LionOptions:
    """optimizer.betas are AdamW's."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Share of the momentum in what a step takes the signs of, and decay rate of the momentum."""

    def __post_init__(self) -> None:
        sound = all(0 <= beta < 1 for beta in self.betas)
        require(sound, f"optimizer.options.betas must be two numbers in [0, 1), got {self.betas}")


class Lion(LibraryOptimizer, pytorch_optimizer.Lion):
    """pytorch-optimizer's."""

    steps_like_adamw = True
    Options = LionOptions
    library_step = inspect.unwrap(pytorch_optimizer.Lion.step)

    def new_state(self, parameter: torch.Tensor) -> State:
        return {"exp_avg": torch.zeros_like(parameter)}
