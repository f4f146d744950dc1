"""Collects the scalars that a model's mixers report of their forward passes (`model.monitor()`), over micro-batches,
steps and ranks.

Collecting costs three small operations on the device per micro-batch, however many layers there are, and never waits
for it: values come to the host, and ranks exchange them, only for a record and after a step that failed.
"""

from __future__ import annotations

import torch

from matmix.train.engine.base import Engine


class Monitor:
    """Collects from forward passes of training. Names that end in "_max" combine by maximum, others by mean; a NaN or
    an infinity of any micro-batch on any rank stays. Models without such values cost nothing."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.names: tuple[str, ...] = ()
        self.step: list[torch.Tensor] = []  # of the step's micro-batches, each (names,)
        self.start_interval()

    def start_interval(self) -> None:
        self.largest: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.count = 0

    def start_step(self) -> None:
        self.step.clear()

    def collect(self) -> None:
        """Call it after a forward pass and before its backward pass, which may run forward passes again."""
        values = self.engine.module.monitor()
        if not values:
            return
        self.names = tuple(values)
        stacked = torch.stack(list(values.values())).detach()
        self.step.append(stacked)
        if self.largest is None or self.total is None:
            self.largest, self.total = stacked, stacked.double()
        else:
            self.largest, self.total = torch.maximum(self.largest, stacked), self.total + stacked
        self.count += 1

    def of_step(self) -> dict[str, float]:
        """The values of the step so far, by layer. To be called on all ranks."""
        if not self.step:
            return {}
        stacked = torch.stack(self.step)
        return self._over_ranks(stacked.amax(0), stacked.double().mean(0))

    def of_interval(self) -> dict[str, float]:
        """The values since the last call, by layer. To be called on all ranks."""
        if self.largest is None or self.total is None:
            return {}
        values = self._over_ranks(self.largest, self.total / self.count)
        self.start_interval()
        return values

    def _over_ranks(self, largest: torch.Tensor, mean: torch.Tensor) -> dict[str, float]:
        # Gathered and not reduced: what a maximum makes of a NaN differs between communication libraries.
        gathered = self.engine.all_gather(torch.stack([largest.double(), mean]))
        largest_of_all, mean_of_all = gathered[:, 0].amax(0).tolist(), gathered[:, 1].mean(0).tolist()
        pairs = zip(self.names, largest_of_all, mean_of_all, strict=True)
        return {name: high if name.endswith("_max") else mean for name, high, mean in pairs}
