"""The loss on the validation split: every target once, the same result for any number of ranks (but of `embedding`,
which compares the examples of a micro-batch)."""

import math
from collections.abc import Mapping

import numpy as np
import torch

from matmix.data.loading.batch import Batch
from matmix.train.config import RunConfig
from matmix.train.evaluators.base import Evaluation, Evaluator
from matmix.train.tasks.base import Costs, Predicted, Task
from matmix.train.tasks.finetuning.base import ExampleTask
from matmix.train.tasks.metrics import as_controls

_NO_TARGET = "the validation split holds no target to evaluate; prepare more validation data"


def check_targets(evaluation: Evaluation, limit: int) -> None:
    """Raises ValueError (one line) where the first `limit` global batches of the validation split, 0 = all, hold no
    target. Called on all ranks."""
    for batch in evaluation.batches(limit):
        targets = torch.tensor(float(evaluation.task.count_targets(batch)), device=evaluation.engine.device)
        if evaluation.sum_over_ranks(targets).item():
            return
    raise ValueError(_NO_TARGET)


class ValidationLoss(Evaluator):
    """`loss`, the mean over the targets, and the metrics that the task computes from its sums."""

    def begin(self, evaluation: Evaluation) -> None:
        size = 1 + len(self.task.recorded)
        self.sums = torch.zeros(size, dtype=torch.float64, device=evaluation.engine.device)
        self.targets = 0

    def observe(self, batch: Batch, costs: Costs, targets: int) -> None:
        costs_by_name = [costs.loss, *(costs.sums[name] for name in self.task.recorded)]
        self.sums += torch.stack([values.sum() for values in costs_by_name]).double()
        self.targets += targets

    def finish(self, evaluation: Evaluation) -> dict[str, float]:
        sums = evaluation.sum_over_ranks(torch.cat([self.sums, self.sums.new_tensor([self.targets])]))
        *totals, count = sums.tolist()
        if count == 0:
            raise ValueError(_NO_TARGET)
        means = dict(zip(("loss", *self.task.recorded), (value / count for value in totals), strict=True))
        return self.task.measures(means, evaluation.loader)

    def progress(self, metrics: Mapping[str, float]) -> list[str]:
        if "loss" not in metrics:
            return []
        return [f"validation loss {metrics['loss']:.4f}", *self.task.progress(metrics)]

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        return self.task.summary(metrics)


class Scores(Evaluator):
    """The metrics of tasks on labelled examples and their controls, the same for any number of ranks; NaN where the
    model has predicted a number that is not finite."""

    @classmethod
    def applies(cls, config: RunConfig, task: Task) -> bool:
        return isinstance(task, ExampleTask)

    def begin(self, evaluation: Evaluation) -> None:
        self.parts: list[Predicted] = []

    def observe(self, batch: Batch, costs: Costs, targets: int) -> None:
        assert costs.predicted is not None
        self.parts.append(Predicted(*(values.cpu().numpy() for values in costs.predicted)))

    def finish(self, evaluation: Evaluation) -> dict[str, float]:
        predicted = in_order(evaluation.gather(self.parts))
        examples = evaluation.loader.facts.examples
        scores = self.task.scores(predicted._replace(values=np.nan_to_num(predicted.values)), examples)
        if not np.isfinite(predicted.values).all():  # as the loss of such a model is none
            scores = dict.fromkeys(scores, math.nan)
        return scores | as_controls(self.task.control(predicted, examples))


def in_order(parts: list[Predicted]) -> Predicted:
    """Returns all predictions in the order of their examples, without those that filled up the last batch."""
    together = Predicted(*(np.concatenate(values) for values in zip(*parts, strict=True)))
    order = np.argsort(together.numbers, kind="stable")
    order = order[together.numbers[order] >= 0]
    return Predicted(*(values[order] for values in together))
