"""AdamW (arXiv 1711.05101)."""

import inspect
from typing import Any, Self

import torch

from matmix.train.optim.base import Optimizer, State
from matmix.train.optim.config import OptimizerConfig


class AdamW(Optimizer, torch.optim.AdamW):
    """torch's, fused where the device allows it."""

    steps_like_adamw = True
    capturable = True
    # As torch wraps it, it imports torch's compiler, which takes a second at the start of every run.
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    @classmethod
    def from_config(cls, groups: list[dict[str, Any]], config: OptimizerConfig, options: Any) -> Self:
        return cls(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True, capturable=True)

    def new_state(self, parameter: torch.Tensor) -> State:
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
