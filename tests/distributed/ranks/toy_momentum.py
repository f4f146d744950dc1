"""An optimizer in one file: momentum, its one entry, for matrices; it does not take vectors and embeddings."""

from __future__ import annotations

import torch

from matmix.train.optim.base import Optimizer, State


class Momentum(Optimizer):
    def __init__(self, groups, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @classmethod
    def takes(cls, name: str, shape: torch.Size) -> bool:
        return len(shape) == 2 and not name.startswith("embedding")

    def new_state(self, parameter: torch.Tensor) -> State:
        return {"momentum": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state_of(parameter)["momentum"]
                    momentum.mul_(0.9).add_(parameter.grad)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum * group["lr"])


class WholeMatrices(Momentum):
    """Its steps depend on all of a matrix, and it keeps a number for each row in another type."""

    elementwise = False

    def new_state(self, parameter: torch.Tensor) -> State:
        return {"rows": torch.zeros_like(parameter, dtype=torch.bfloat16).sum(1)}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows = self.state_of(parameter)["rows"]
                    rows.add_(parameter.grad.square().mean(1).to(torch.bfloat16))
                    scale = (rows.float() + 1e-6).rsqrt().unsqueeze(1)
                    parameter.sub_(parameter.grad * scale * group["lr"])
