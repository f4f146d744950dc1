"""The base class of evaluators, and one evaluation, which all evaluators that are due share."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.train.arguments import NoOptions
from matmix.train.checkpoint.lanes import Lanes
from matmix.train.config import RunConfig
from matmix.train.engine.base import Engine
from matmix.train.process.distributed import gather_objects
from matmix.train.process.heartbeat import beat
from matmix.train.tasks.base import Costs, Metric, Task, words_on


class Interrupted(Exception):
    """A signal to any rank ends an evaluation on all ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation: the model, the task, and the batches of the validation split. All ranks make the same calls.

    loader: a one-pass loader that gives each rank the same number of micro-batches (rows without data have no targets),
    so that sharded models can gather their weights together. interrupted: asked before each micro-batch; where it is
    true on any rank, `Interrupted` is raised on all.
    """

    engine: Engine
    task: Task
    loader: Loader
    interrupted: Callable[[], bool] = lambda: False

    @property
    def model(self) -> torch.nn.Module:
        return self.engine.model

    def walk(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields this rank's parts of the micro-batches, unless a signal comes."""
        for batch in batches:
            beat("a batch of the evaluation")
            interrupted = torch.tensor(float(self.interrupted()), device=self.engine.device)
            if self.engine.all_reduce_sum(interrupted).item():
                raise Interrupted
            yield self.engine.part_of_batch(batch)

    def batches(self, limit: int) -> Iterator[Batch]:
        """Yields this rank's micro-batches of the first `limit` global batches, 0 = all, in host memory."""
        self.loader.samples = 0
        lanes = Lanes(self.loader)
        read = itertools.islice(self.loader, limit * self.loader.micro_batches_per_step or None)
        return (lanes.attach(number, batch) for number, batch in enumerate(self.walk(read)))

    def on_device(self, batch: Batch) -> Batch:
        return batch.to(self.engine.device, non_blocking=True)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Returns the sum of what the ranks have of their batches; tensor: on the engine's device."""
        return self.engine.sum_over_batches(tensor)

    def gather(self, parts: list[Any]) -> list[Any]:
        """Returns what the ranks have found in their batches, one after the other, on every rank."""
        return [one for part in gather_objects(parts if self.engine.mesh.is_counted else []) for one in part]


class Evaluator:
    """Measures something of the model every so many steps and at the end. What `finish` returns goes into
    metrics.jsonl, TensorBoard and the run's summary.

    Those that are due share one pass over the validation split, where they have an `observe`; others take what batches
    they need in `finish`. The model is in evaluation mode and needs no gradients.
    """

    Options: ClassVar[type] = NoOptions
    """Frozen dataclass of its options; every field has a default."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """The name, unit and direction of its metrics: those that are listed here are shown after an evaluation and at the
    end of the run."""

    def __init__(self, config: RunConfig, task: Task, options: Any) -> None:
        self.config, self.task, self.options = config, task, options

    @classmethod
    def applies(cls, config: RunConfig, task: Task) -> bool:
        """Returns whether there is anything to measure in such a run."""
        return True

    def begin(self, evaluation: Evaluation) -> None:
        """Called before the pass over the data."""

    def observe(self, batch: Batch, costs: Costs, targets: int) -> None:
        """Called for each micro-batch, on the device, with its costs by `Task.costs` and number of targets."""

    def finish(self, evaluation: Evaluation) -> dict[str, float]:
        """Returns the metrics by name, the same on all ranks."""
        raise NotImplementedError

    def progress(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the results of all evaluators that were due in a few words each, for the line of progress."""
        return words_on(self.metrics, metrics)

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the results in sentences, for the end of a run."""
        known = [metric for metric in self.metrics if metric.name in metrics]
        return [f"{metric.title.capitalize()}: {metric.number(metrics[metric.name])}." for metric in known]


PREFIX = "ema_"
"""What the names of metrics of the averaged weights begin with in records."""
TITLE = "averaged weights"


def of_averaged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the averaged weights in those of an evaluation, by their usual names."""
    return {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}


def averaged_metrics(known: Iterable[Metric]) -> list[Metric]:
    """Returns the metrics of the averaged weights that an evaluation has where it has the `known` ones."""
    return [
        dataclasses.replace(metric, name=PREFIX + metric.name, title=f"{metric.title} of the {TITLE}")
        for metric in known
    ]
