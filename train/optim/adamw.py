"""AdamW (arXiv 1711.05101)."""

from __future__ import annotations

import inspect
from typing import Any, Self

import torch

from matmix.train.optim.base import Optimizer
from matmix.train.optim.config import OptimizerConfig


class AdamW(Optimizer, torch.optim.AdamW):
    """torch's, fused where the device allows it."""

    moments = ("exp_avg", "exp_avg_sq")
    counts = ("step",)
    # As torch wraps these two, they import its compiler, which takes a second at the start of every run.
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    @classmethod
    def from_config(cls, groups: list[dict[str, Any]], config: OptimizerConfig, options: Any) -> Self:
        return cls(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
