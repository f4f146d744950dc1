"""Adafactor (arXiv 1804.04235): the second moments of a matrix are those of its rows times those of its columns."""

import dataclasses
from typing import Any

import torch

from matmix.train.errors import require, require_at_least
from matmix.train.optim.base import Optimizer, State, local_part, rows_here, sum_over_parts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdafactorOptions:
    """Names and values as of torch's."""

    beta2_decay: float = -0.8
    """After step t the newest squares are the share t ** beta2_decay of the second moments."""
    d: float = 1.0
    """A step whose root mean square is above it is scaled down to it."""

    def __post_init__(self) -> None:
        require(self.beta2_decay <= 0, f"optimizer.options.beta2_decay must be at most 0, got {self.beta2_decay}")
        require_at_least(self, "optimizer.options.", d=1)


class Adafactor(Optimizer, torch.optim.Adafactor):
    """torch's, with means of whole tensors where they are sharded. The step of a tensor is its root mean square, at
    least 0.001, times the learning rate, at most 1 / sqrt(t)."""

    elementwise = False
    Options = AdafactorOptions

    def new_state(self, parameter: torch.Tensor) -> State:
        step, shape = {"step": torch.zeros(())}, parameter.shape
        if len(shape) < 2:
            return {**step, "variance": torch.zeros_like(parameter)}
        sizes = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
        # All ranks hold them whole: next to the matrix they are small.
        return step | {
            name: torch.zeros(size, dtype=parameter.dtype, device=parameter.device) for name, size in sizes.items()
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, state, group in self.with_gradients():
            self._update(parameter, state, group)

    def _update(self, parameter: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        state["step"] += 1
        step, lr, (eps, smallest) = float(state["step"]), group["lr"], group["eps"]
        eps = torch.finfo(parameter.dtype).eps if eps is None else eps
        here, gradient = local_part(parameter), local_part(parameter.grad)
        newest = step ** group["beta2_decay"]
        if "variance" in state:
            variance = local_part(state["variance"]).lerp_(gradient.square(), newest).clone()
        else:
            variance = _factored(parameter, gradient.square(), state["row_var"], state["col_var"], newest, eps)
        update = variance.clamp_(min=eps * eps).rsqrt_().mul_(gradient)
        squares = sum_over_parts(torch.stack([here.square().sum(), update.square().sum()]), parameter)
        size, length = squares.div_(parameter.numel()).sqrt_()
        rate = min(lr, step**-0.5) * size.clamp(min=smallest) / (length / group["d"]).clamp(min=1)
        here.mul_(1 - lr * group["weight_decay"]).sub_(update.mul_(rate))


def _factored(
    parameter: torch.Tensor, squares: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, newest: float, eps: float
) -> torch.Tensor:
    """Takes the squared gradients of this rank's part of a parameter into the means over its last two dimensions, in
    place. Returns the part's second moments."""
    own = slice(*rows_here(parameter))
    sums = torch.zeros_like(rows), torch.zeros_like(columns)
    sums[0][own] = squares.sum(-1, keepdim=True)
    # Only the columns of a matrix lie on several ranks: what has more dimensions is cut along another one.
    (sums[1] if parameter.dim() == 2 else sums[1][own]).copy_(squares.sum(-2, keepdim=True))
    whole = sum_over_parts(torch.cat([one.flatten() for one in sums]), parameter).split([rows.numel(), columns.numel()])
    for means, one, length in zip((rows, columns), whole, (parameter.shape[-1], parameter.shape[-2]), strict=True):
        means.lerp_(one.view_as(means) / length, newest)
    relative = rows / rows.mean(-2, keepdim=True).clamp_(min=eps)
    return relative[own] @ (columns if parameter.dim() == 2 else columns[own])
