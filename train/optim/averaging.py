"""The exponential moving average of a model's weights: e_0 is the weights before the first step, and e_t = d e_(t-1) +
(1 - d) w_t after step t. The optimizer holds it as one more entry of its state."""

from collections.abc import Mapping
from typing import Any

import torch

from matmix.train.optim.base import Optimizer, local_part
from matmix.train.optim.config import EmaConfig

AVERAGE, STEPS = "ema", "ema_step"
"""Entries of the optimizer's state of a parameter: the average, in its shape, and the steps that it has seen."""
ENTRIES = frozenset({AVERAGE, STEPS})


def keep_average(optimizer: Optimizer, config: EmaConfig) -> None:
    """Makes `optimizer` keep an average of what it updates, from its next step on; nothing where `config` has none. A
    parameter has an average from its first update on. A step that the engine drops does not count."""
    if not config.decay:
        return
    optimizer.also_kept = lambda parameter: {AVERAGE: torch.zeros_like(parameter), STEPS: torch.zeros(())}
    before: dict[torch.Tensor, torch.Tensor] = {}  # weights of parameters that have no average yet

    @torch.no_grad()
    def remember(*_: Any) -> None:
        for parameter in _updated(optimizer):
            if AVERAGE not in optimizer.state.get(parameter, ()):
                before[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def average(*_: Any) -> None:
        pulls: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}  # by how far: averages, weights
        for parameter in _updated(optimizer):
            state = optimizer.state[parameter]
            if AVERAGE not in state:  # now, as an optimizer takes a state that is not empty for its own
                state[AVERAGE], state[STEPS] = before.pop(parameter), torch.zeros(())
            state[STEPS] += 1
            step = int(state[STEPS])
            if step % config.every == 0:
                averages, weights = pulls.setdefault(1 - decay_at(step, config), ([], []))
                averages.append(local_part(state[AVERAGE]))
                weights.append(local_part(parameter.detach()))
        for pull, (averages, weights) in pulls.items():
            torch._foreach_lerp_(averages, weights, pull)

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(average)


def decay_at(step: int, config: EmaConfig) -> float:
    """Returns the share of the average that an update after `step` steps leaves, `config.every` after the last one."""
    decay = min(config.decay, (1 + step) / (10 + step)) if config.warmup else config.decay
    return decay**config.every


@torch.no_grad()
def swap_average(weight: torch.Tensor, state: Mapping[str, Any] | None) -> None:
    """Lets a weight and its average change places, if the optimizer's `state` of it has one. Twice leaves every bit."""
    if state and AVERAGE in state:
        here, there = local_part(weight.detach()), local_part(state[AVERAGE])
        kept = here.clone()
        here.copy_(there)
        there.copy_(kept)


def _updated(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns what a step of `optimizer` updates, or has updated before. (DeepSpeed shows it one group at a time.)"""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if parameter.grad is not None or optimizer.state.get(parameter)]
