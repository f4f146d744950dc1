"""The loss on the validation split: every target once, the same result for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from matmix.data.loading.batch import Batch
from matmix.train.evaluators.base import Evaluation, Evaluator
from matmix.train.tasks.base import Costs


class ValidationLoss(Evaluator):
    """`loss`, the mean over the targets, and the metrics that the task computes from its sums."""

    def begin(self, evaluation: Evaluation) -> None:
        size = 1 + len(self.task.recorded)
        self.sums = torch.zeros(size, dtype=torch.float64, device=evaluation.engine.device)
        self.targets = 0

    def observe(self, batch: Batch, costs: Costs, targets: int) -> None:
        found = [costs.loss, *(costs.sums[name] for name in self.task.recorded)]
        self.sums += torch.stack([values.sum() for values in found]).double()
        self.targets += targets

    def finish(self, evaluation: Evaluation) -> dict[str, float]:
        sums = evaluation.sum_over_ranks(torch.cat([self.sums, self.sums.new_tensor([self.targets])]))
        *found, count = sums.tolist()
        if count == 0:
            raise ValueError("the validation split holds no target to evaluate; prepare more validation data")
        means = dict(zip(("loss", *self.task.recorded), (value / count for value in found), strict=True))
        return self.task.measures(means, evaluation.loader)

    def progress(self, metrics: Mapping[str, float]) -> list[str]:
        if "loss" not in metrics:
            return []
        return [f"validation loss {metrics['loss']:.4f}", *self.task.progress(metrics)]

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        return self.task.summary(metrics)
