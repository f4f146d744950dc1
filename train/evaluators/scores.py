"""Scores of all predictions of a split: gathered from the ranks, each example once, and given to the task."""

from __future__ import annotations

import numpy as np

from matmix.data.loading.batch import Batch
from matmix.train.config import RunConfig
from matmix.train.evaluators.base import Evaluation, Evaluator
from matmix.train.tasks.base import Costs, Predicted, Task
from matmix.train.tasks.finetuning.base import ExampleTask
from matmix.train.tasks.metrics import as_controls


class Scores(Evaluator):
    """The metrics of tasks on labelled examples and their controls, the same for any number of ranks."""

    @classmethod
    def applies(cls, config: RunConfig, task: Task) -> bool:
        return isinstance(task, ExampleTask)

    def begin(self, evaluation: Evaluation) -> None:
        self.found: list[Predicted] = []

    def observe(self, batch: Batch, costs: Costs, targets: int) -> None:
        assert costs.predicted is not None
        self.found.append(Predicted(*(values.cpu().numpy() for values in costs.predicted)))

    def finish(self, evaluation: Evaluation) -> dict[str, float]:
        predicted = in_order(evaluation.gather(self.found))
        examples = evaluation.loader.facts.examples
        return self.task.scores(predicted, examples) | as_controls(self.task.control(predicted, examples))


def in_order(parts: list[Predicted]) -> Predicted:
    """All predictions in the order of their examples, without those that filled up the last batch."""
    together = Predicted(*(np.concatenate(values) for values in zip(*parts, strict=True)))
    order = np.argsort(together.numbers, kind="stable")
    order = order[together.numbers[order] >= 0]
    return Predicted(*(values[order] for values in together))
