"""Defines tasks: how batches are made, what is learned from them as sums and counts, and what is measured.

Sums instead of means keep gradient accumulation, packing, masking and uneven ranks exact: the loop divides by the
number of targets of the whole global batch, wherever its pieces were computed.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from matmix.data.config import DataConfig
from matmix.data.loading.batch import Batch, has_target
from matmix.data.loading.loader import Loader
from matmix.data.modalities import MODALITIES, Modality, modality_of
from matmix.model.architecture import Outputs
from matmix.model.config import ModelConfig
from matmix.model.flops import flops_per_token
from matmix.train.arguments import NoOptions, read_options
from matmix.train.engine.mesh import Mesh
from matmix.train.errors import require
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.metrics import Metric, control_lines, words_on


class Loss(NamedTuple):
    """Sums over the targets of a micro-batch."""

    total: Tensor
    """Differentiable, regularisers included."""
    loss: Tensor
    """What is reported as the loss."""
    sums: dict[str, Tensor]
    """One for each name in `Task.recorded`."""


class Predicted(NamedTuple):
    """The predictions of a model for labelled examples; tensors, or arrays of several micro-batches, of one length."""

    numbers: Any
    """int64 (n,): of the examples, -1 = none."""
    values: Any
    """(n, ...): what the task makes of the outputs."""
    labels: Any
    """(n, ...)"""


class Costs(NamedTuple):
    """The costs of single predictions of a micro-batch, without gradients: tensors of one length, whose sums are those
    of `Loss`; zeros where there is no target."""

    loss: Tensor
    sums: dict[str, Tensor]
    predicted: Predicted | None = None
    """The predictions, of labelled examples."""


def forward(model: nn.Module, batch: Batch, readout: Callable[..., Any] | None = None) -> Any:
    """Returns what the model, or `readout` in it, makes of a micro-batch."""
    more = dict(batch.extra)
    if batch.carried is not None:
        batch.carried.continues, more["carried"] = batch.continues, batch.carried
    return model(
        batch.inputs,
        cu_seqlens=batch.cu_seqlens,
        attention_mask=batch.attention_mask,
        max_seqlen=batch.max_seqlen,
        select=batch.select,
        readout=readout,
        **more,
    )


class Task:
    """A task that a model is trained on. A subclass must define `loss`; all else has a default."""

    architectures: ClassVar[tuple[str, ...]] = ()
    """The values of model.architecture that it trains; () = all."""
    Options: ClassVar[type] = NoOptions
    """Frozen dataclass of its options in [objective.options]; every field has a default."""
    modalities: ClassVar[tuple[str, ...]] = ("text", "samples")
    """The names in `MODALITIES` of the kinds of data that it is learned from. Of several the recipe names one."""
    recorded: ClassVar[tuple[str, ...]] = ()
    """Names of what is summed besides the loss; training records have the means over the targets."""
    target_share: float = 1.0
    """Share of the positions that are predicted in training, and so pass through the readout; 0.0 where there is one
    output for each document, of which the model knows."""
    loss_metric: ClassVar[Metric] = Metric(name="loss", title="loss", unit="nats per target")
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """What else an evaluation finds and shows, the most telling first."""
    writes_with: ClassVar[tuple[str, ...]] = ()
    """Options of `matmix generate` that an encoder writes with."""

    takes_teacher: ClassVar[bool] = False
    """Whether it learns from the model that `objective.teacher` names."""

    captured: bool = False
    """Whether a CUDA graph holds `loss`, which then may not wait for the device."""
    mesh: Mesh = Mesh()
    """The ranks of the run, which the trainer sets; by default a single one. Only losses that compare the examples of
    several ranks look at it."""

    def __init__(self, objective: ObjectiveConfig) -> None:
        """Raises ValueError (one line) for options that it does not have."""
        unused = f'objective.teacher is not for objective.name = "{objective.name}": leave it out'
        require(self.takes_teacher or not objective.teacher, unused)
        self.objective = objective
        self.options = read_options(objective.options, self.Options, "objective.options")

    # -- batches -------------------------------------------------------------------------------------------------

    def modality(self, data: DataConfig) -> Modality:
        """Returns the kind of data that it is learned from in a run on `data`."""
        return modality_of(data, self.modalities)

    @property
    def unit(self) -> str:
        """The unit of counters: `Modality.unit`."""
        return MODALITIES[self.modalities[0]].unit

    def asks(self, split: str) -> dict[str, Any]:
        """Returns what it asks of its modality besides, as arguments of `Modality.open`."""
        return {}

    def make_loader(self, data: DataConfig, *, split: str, **options: Any) -> Loader:
        """Returns the loader of a split; options: those of `Modality.loader`."""
        return self.modality(data).loader(data, split=split, **self.asks(split), **options)

    def example_batch(self, inputs: Tensor) -> Batch:
        """Returns a batch of made-up inputs (B, L, ...) with as many targets as in training, for estimates."""
        return Batch(
            inputs=inputs, labels=inputs.clone(), max_seqlen=inputs.shape[1], n_tokens=inputs.shape[0] * inputs.shape[1]
        )

    def units(self, seqlen: int) -> int:
        """Returns how many units a sample of data.seqlen = `seqlen` is."""
        return MODALITIES[self.modalities[0]].units(seqlen)

    def flops(self, model: ModelConfig, seqlen: int) -> float:
        """Returns operations (2 per multiply-add) of a forward pass for a unit of a sample of so many tokens."""
        positions = model.model_class.sequence_length(model, seqlen)
        share = flops_per_token(model, positions, head_share=self.target_share)
        return share * (positions / self.units(seqlen))

    def count_targets(self, batch: Batch) -> int:
        """Returns the number of targets of a micro-batch, by which the sums of `loss` are divided, on the host."""
        return batch.select.numel() if batch.select is not None else int(has_target(batch.labels.numpy()).sum())

    # -- the loss ------------------------------------------------------------------------------------------------

    def learn_from(self, teacher: nn.Module, words: str, student: ModelConfig) -> None:
        """Called before the first step, where `takes_teacher`, with the trained model on its device, its name in
        messages, and the model that is trained. Raises ValueError (one line) for a teacher that does not fit."""
        raise NotImplementedError

    forward = staticmethod(forward)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Returns the sums of a micro-batch, which is on the model's device."""
        raise NotImplementedError

    @torch.no_grad()
    def costs(self, model: nn.Module, batch: Batch) -> Costs:
        """Like `loss`, but with a value for each prediction where the task can tell them apart."""
        _, loss, sums = self.loss(model, batch)
        return Costs(loss.reshape(1), {name: value.reshape(1) for name, value in sums.items()})

    def outputs(self, data: DataConfig) -> Outputs:
        """Returns what the outputs of a classifier that was trained on `data` stand for."""
        return Outputs()

    # -- what is measured and said -------------------------------------------------------------------------------

    def measures(self, means: dict[str, float], loader: Loader) -> dict[str, float]:
        """Returns the metrics of an evaluation; means: "loss" and what is `recorded`, per target of the validation
        split that `loader` reads."""
        return means

    def progress(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the text that an evaluation adds to the line of progress besides the loss, in a few words each."""
        return words_on(self.metrics, metrics)

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the results of the last evaluation in sentences, with those of its controls, for the end of a run."""
        loss = f"Validation loss {self.loss_metric.number(metrics['loss'])}"
        return [", ".join([loss, *words_on(self.metrics, metrics)]) + ".", *control_lines(self.metrics, metrics)]
