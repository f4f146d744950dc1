"""Optimizers of pytorch-optimizer, which counts steps in groups and knows nothing of shards, as `Optimizer`s."""

import collections
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from matmix.train.optim.base import Optimizer, State, local_part


class LibraryOptimizer(Optimizer):
    """An optimizer whose steps are a library's: that one is shown plain tensors, which are this rank's parts of
    parameters, gradients and entries. A number "step" among the entries is the count that it looks for in the group."""

    library_step: ClassVar[Callable[..., Any]]
    """The library's method `step`, unwrapped: torch may have wrapped it in the hooks that run around this one."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.whole: dict[torch.Tensor, torch.Tensor] = {}
        """By the gradient that the library is shown, the parameter that it is of."""
        shown: list[dict[str, Any]] = []
        entries: dict[torch.Tensor, State] = collections.defaultdict(dict)
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state_of(parameter) for parameter in updated]
            step = max((int(state["step"]) for state in states if "step" in state), default=0)
            parts = [local_part(parameter).detach() for parameter in updated]
            for parameter, part, state in zip(updated, parts, states, strict=True):
                part.grad = local_part(parameter.grad)
                self.whole[part.grad] = parameter
                entries[part] = {name: local_part(entry) for name, entry in state.items()}
            if parts:
                shown.append({**group, "params": parts, "step": step})
        self.run_library(shown, entries)
        self.whole.clear()  # gradients would stay
        for group in shown:
            for part in group["params"]:
                if "step" in entries[part]:
                    entries[part]["step"].fill_(group["step"])

    def run_library(self, groups: list[dict[str, Any]], entries: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Runs the library's step on these groups and what is kept of their parameters, in place."""
        before = self.param_groups, self.state
        self.param_groups, self.state = groups, entries
        try:
            self.library_step()
        finally:
            self.param_groups, self.state = before
