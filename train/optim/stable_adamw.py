"""StableAdamW (arXiv 2304.13013): AdamW whose rate for a tensor is divided by the root mean square of its gradients
over their second moments, where that is above 1."""

import inspect
from typing import Any, Self

import pytorch_optimizer
import torch

from matmix.train.optim.base import State, sum_over_parts
from matmix.train.optim.config import OptimizerConfig
from matmix.train.optim.library import LibraryOptimizer


class StableAdamW(LibraryOptimizer, pytorch_optimizer.StableAdamW):
    """pytorch-optimizer's, with root mean squares of whole tensors where they are sharded."""

    elementwise = False
    steps_like_adamw = True
    library_step = inspect.unwrap(pytorch_optimizer.StableAdamW.step)

    @classmethod
    def from_config(cls, groups: list[dict[str, Any]], config: OptimizerConfig, options: Any) -> Self:
        return cls(groups, lr=config.lr, betas=config.betas, eps=config.eps, kahan_sum=False)

    def new_state(self, parameter: torch.Tensor) -> State:
        return {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def get_stable_adamw_rms(self, grad: torch.Tensor, exp_avg_sq: torch.Tensor, eps: float = 1e-16) -> torch.Tensor:
        """Returns what the library divides the rate of a tensor by, 0-dim; of this rank's part of it as given."""
        whole = self.whole[grad]
        total = sum_over_parts(grad.square().div_(exp_avg_sq.clip(min=eps)).sum(), whole)
        return total.div_(whole.numel()).sqrt_().clip_(min=1.0)
