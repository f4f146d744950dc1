"""Muon (https://kellerjordan.github.io/posts/muon/): the momentum of each linear map, made orthogonal by Newton-Schulz
iterations, at rates that are AdamW's (arXiv 2502.16982)."""

import dataclasses
from typing import Any, Literal

import torch
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr

from matmix.train.errors import require
from matmix.train.optim.base import Optimizer, State, StepCost, full_shape, local_part
from matmix.train.optim.owners import maps_of, on_owners, work_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuonOptions:
    momentum: float = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """A step takes the gradient's share of the next momentum, too."""
    iterations: int = 5
    """Of Newton-Schulz, of degree 5: singular values come to lie between 0.7 and 1.2, or so."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the iterations, and of what ranks send each other for them. bfloat16 is as torch.optim.Muon has it, and rounds
    differently on other numbers of ranks."""
    rate: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on the rate of an (m, n) map. match_rms_adamw: 0.2 sqrt(max(m, n)), so that rates and weight decay are
    those of adamw; original: sqrt(max(1, m / n))."""

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, f"optimizer.options.momentum must lie in [0, 1), got {self.momentum}")
        require(1 <= self.iterations < 100, f"optimizer.options.iterations must be 1 to 99, got {self.iterations}")


def orthogonal(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Returns about U V^T of a matrix U S V^T (m, n), in its dtype. torch's own function does the same in bfloat16."""
    x = matrix.T if len(matrix) > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C), x, beta=DEFAULT_A)
    return x.T if len(matrix) > matrix.shape[1] else x


class Muon(Optimizer):
    """Updates the matrices of the layers, each by one rank. It keeps the momentum, sharded as the parameter."""

    elementwise = False
    of_linear_maps = True
    Options = MuonOptions

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: Any) -> None:
        super().__init__(groups, {"lr": lr, "blocks": None})
        self.options = MuonOptions(**options)
        self.sent_bytes = getattr(torch, self.options.dtype).itemsize

    @classmethod
    def takes(cls, name: str, shape: torch.Size) -> bool:
        # Embeddings and heads stand outside of the layers.
        return len(shape) == 2 and name.startswith("blocks.")

    def new_state(self, parameter: torch.Tensor) -> State:
        return {"momentum": torch.zeros_like(parameter)}

    def step_cost(self, copies: int, parts: int) -> StepCost:
        shapes, blocks = [], []
        for group in self.param_groups:
            shapes += [full_shape(parameter) for parameter in group["params"]]
            blocks += group["blocks"] or [None] * len(group["params"])
        maps = maps_of(
            [shape[1] for shape in shapes],
            [rows or (shape[0],) for rows, shape in zip(blocks, shapes, strict=True)],
        )
        work, elements = work_of(maps, copies, parts)
        rounded = self.options.dtype == "bfloat16"
        if rounded:  # copies of this rank's rows of all directions
            elements += sum(shape.numel() for shape in shapes) / parts
        precision = "bf16" if rounded else "fp32"
        return StepCost(2 * self.options.iterations * work, elements * self.sent_bytes, precision)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        own, dtype = self.options, getattr(torch, self.options.dtype)
        parameters, directions, blocks, rates = [], [], [], []
        for group in self.param_groups:
            stated = group["blocks"] or [None] * len(group["params"])
            for parameter, rows in zip(group["params"], stated, strict=True):
                if parameter.grad is None:
                    continue
                gradient, momentum = local_part(parameter.grad), local_part(self.state_of(parameter)["momentum"])
                momentum.lerp_(gradient, 1 - own.momentum)
                if group["lr"]:
                    local_part(parameter.detach()).mul_(1 - group["lr"] * group["weight_decay"])
                    parameters.append(parameter)
                    # In the gradient's memory: nobody reads it after the step.
                    directions.append((gradient.lerp_(momentum, own.momentum) if own.nesterov else momentum).to(dtype))
                    blocks.append(rows or (len(parameter),))
                    rates.append(group["lr"])
        updates = on_owners(parameters, directions, blocks, lambda whole: orthogonal(whole, own.iterations))
        for one, rows, update in updates:
            rate = _adjust_lr(rates[one.place], own.rate, one.shape)
            local_part(parameters[one.place].detach())[rows].add_(update, alpha=-rate)
