"""What a step computes on the device, from its micro-batches to the new weights: one operation after the other, or all
of them as one CUDA graph (`engine.cuda_graph`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from matmix.data.loading.batch import Batch, with_selected
from matmix.train.config import RunConfig
from matmix.train.engine.base import Engine
from matmix.train.errors import require
from matmix.train.failures import is_out_of_memory
from matmix.train.meters.speed import Monitor
from matmix.train.optim import optimizer_class
from matmix.train.process.distributed import Distributed
from matmix.train.tasks import Task

T = TypeVar("T")

WARM_UP = 3
"""Steps before the one that is recorded. They load kernels and make what stays from step to step."""


class Computed(NamedTuple):
    """What a step leaves on the device besides new weights."""

    sums: Tensor
    """float64 (4 + recorded,): a place for the host, whether the norm is not finite, whether copies differ, and over
    the targets of this rank the loss and what the task records."""
    norm: Tensor
    """That of `Engine.step`."""
    monitored: list[Tensor]
    """What a `Monitor` has read of each micro-batch."""


class Step:
    """Computes steps, one operation after the other."""

    def __init__(self, engine: Engine, task: Task, monitor: Monitor, max_norm: float) -> None:
        """max_norm: as of `Engine.step`."""
        self.engine, self.task, self.monitor, self.max_norm = engine, task, monitor, max_norm

    def __call__(self, batches: Sequence[Batch], divisor: float | Tensor) -> Computed:
        """Takes a step at the rates of the optimizer's groups. batches: this rank's micro-batches, anywhere; divisor:
        the targets of the global batch."""
        engine, names = self.engine, self.task.recorded
        sums = torch.zeros(4 + len(names), dtype=torch.float64, device=engine.device)
        monitored: list[Tensor] = []
        for number, batch in enumerate(batches, 1):
            loss = self.task.loss(engine.model, batch.to(engine.device, non_blocking=True))
            monitored += self.monitor.read()
            engine.backward(loss.total / divisor, last=number == len(batches))
            sums[3:] += torch.stack([loss.loss.detach(), *(loss.sums[name].detach() for name in names)]).double()
        norm = engine.step(self.max_norm)
        sums[1], sums[2] = ~torch.isfinite(norm), engine.gradients_differ
        return Computed(sums, norm, monitored)

    def forget(self) -> None:
        """Called where weights and optimizer have been put back to a checkpoint."""


class GraphedStep(Step):
    """Computes the first steps as `Step` does, and further ones as replays of a graph of one.

    A graph works in the memory that it was recorded with: batches are copied to tensors that stay, and the divisor and
    the rates are tensors, too. Weights and moments stay where they are between two calls of `forget`.
    """

    def __init__(self, engine: Engine, task: Task, monitor: Monitor, max_norm: float) -> None:
        super().__init__(engine, task, monitor, max_norm)
        task.captured = True
        # Of float32, as the fused update reads rates.
        self.numbers = torch.zeros(1 + len(engine.optimizer.param_groups), device=engine.device)
        self.batches: list[Batch] = []
        self.room = -1  # positions in `select`
        self.recorder: Recorder | None = None
        self.computed: Computed | None = None
        self.taken = 0

    def forget(self) -> None:
        self.taken, self.recorder, self.computed = 0, None, None

    def __call__(self, batches: Sequence[Batch], divisor: float | Tensor) -> Computed:
        groups = self.engine.optimizer.param_groups
        self.numbers.copy_(torch.tensor([divisor, *(group["lr"] for group in groups)]))
        for group, rate in zip(groups, self.numbers[1:], strict=True):
            group["lr"] = rate
        self._fill(self._of_one_length(batches))
        self.recorder = self.recorder or Recorder(self.engine.device)
        if self.taken < WARM_UP:
            computed = self.recorder.run(self._compute)
        else:
            self.computed = self.computed or self._record()
            self.recorder.replay()
            computed = self.computed
        self.taken += 1
        return tree_map_only(Tensor, torch.clone, computed)  # the next step writes over these

    def _compute(self) -> Computed:
        return super().__call__(self.batches, self.numbers[0])

    def _record(self) -> Computed:
        try:
            return self.recorder.record(self._compute)
        except RuntimeError as error:
            # The end of a recording that has failed raises an error of its own.
            cause = error.__context__ or error
            if is_out_of_memory(cause):
                raise
            why = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise ValueError(
                f"engine.cuda_graph: the steps of this run cannot be recorded ({why}); set it to false"
            ) from error

    def _of_one_length(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Returns the batches with as many positions in `select`, where they have it, as those of other steps."""
        counts = [batch.select.numel() for batch in batches if _is_selective(batch)]
        if max(counts, default=-1) > self.room:
            positions = max(batch.labels.numel() for batch in batches)
            expected = self.task.target_share * positions
            # Eight standard deviations more than the mean, and where that did not do, all.
            self.room = min(math.ceil(expected + 8 * math.sqrt(expected)), positions) if self.room < 0 else positions
            self.room = max(self.room, *counts)
            self.batches = []
            self.forget()
        return [with_selected(batch, self.room) if _is_selective(batch) else batch for batch in batches]

    def _fill(self, batches: Sequence[Batch]) -> None:
        """Copies batches to where the graph reads them. Raises ValueError where their shapes are others than before."""
        if not self.batches:
            device = self.engine.device
            self.batches = [batch.map(lambda tensor: torch.empty_like(tensor, device=device)) for batch in batches]
        own, new = _seen(self.batches), _seen(batches)
        if list(map(_form, own)) != list(map(_form, new)):
            raise ValueError(
                "engine.cuda_graph: a graph holds batches of one shape, and those of this run differ; set it to false"
            )
        for place, value in zip(own, new, strict=True):
            if isinstance(value, Tensor):
                place.copy_(value, non_blocking=True)


class Recorder:
    """Runs functions in a stream of its own, and records as a CUDA graph what one launches there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream, self.graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()

    def run(self, function: Callable[[], T]) -> T:
        """Calls a function before it is recorded."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        return result

    def record(self, function: Callable[[], T]) -> T:
        """Calls a function whose launches are recorded and not carried out. Returns what it does: tensors that each
        `replay` writes. Raises RuntimeError where CUDA cannot."""
        # By the thread, as others pin batches and write checkpoints meanwhile.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        """Carries out what was recorded."""
        self.graph.replay()


def check_graph(config: RunConfig, distributed: Distributed, optimizers: Collection[str]) -> None:
    """Raises ValueError (one line) where `config` asks for a graph that this process cannot record. optimizers: the
    names of those of the run."""
    if not config.engine.cuda_graph:
        return
    ranks, kind = distributed.world_size, distributed.device.type
    require(takes_graphs(distributed.device), f"engine.cuda_graph needs a CUDA device, not {kind}; set it to false")
    require(ranks == 1, f"engine.cuda_graph is for runs of one process, and this one has {ranks}; set it to false")
    for name in optimizers:
        graphed = optimizer_class(name).capturable
        require(graphed, f"engine.cuda_graph: a graph holds updates by adamw, not by {name}; set it to false")


def takes_graphs(device: torch.device) -> bool:
    """Returns True where steps on this device can be recorded."""
    return device.type == "cuda"


def make_step(config: RunConfig, engine: Engine, task: Task, monitor: Monitor) -> Step:
    """Returns what computes the steps of a run."""
    kind = GraphedStep if config.engine.cuda_graph else Step
    return kind(engine, task, monitor, config.optimizer.max_grad_norm)


def _is_selective(batch: Batch) -> bool:
    """Returns whether positions of a batch are selected by their labels."""
    return batch.select is not None and batch.examples is None


def _seen(batches: Sequence[Batch]) -> list[Any]:
    """Returns all that a model reads of batches: tensors, numbers and None."""
    of_host = ("n_tokens", "n_damaged", "damaged")
    names = [field.name for field in dataclasses.fields(Batch) if field.name not in of_host]
    return tree_leaves([[getattr(batch, name) for name in names] for batch in batches])


def _form(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value
