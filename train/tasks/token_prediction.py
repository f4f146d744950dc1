"""Prediction of tokens: cross-entropy sums of causal and masked language modelling alike."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.data.loading.masking import IGNORED, MaskingConfig
from matmix.train.errors import require
from matmix.train.tasks.base import Costs, Loss, Metric, Task, forward
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.cross_entropy import linear_cross_entropy, row_cross_entropy

BITS_PER_BYTE = Metric(name="bits_per_byte", title="bits per byte", unit="bits per byte", digits=3)


def bits_per_byte(loss: float, size: float | None) -> dict[str, float]:
    """Returns the metric for a loss in nats per token of `size` bytes; {} where that is not known."""
    return {} if size is None else {BITS_PER_BYTE.name: loss / math.log(2) / size}


class TokenPrediction(Task):
    """Labels come aligned with the position that predicts them. Masked batches carry `select`, the flat positions with
    a label, so that the head runs on those only."""

    recorded = ("accuracy",)
    loss_metric = Metric(name="loss", title="loss", unit="nats per token")
    accuracy = "accuracy"
    """The metric that holds the share of targets predicted right."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        options = {"z_loss": self.objective.z_loss, "fused": not self.captured}
        readout = partial(linear_cross_entropy, **asked_of(batch), **options)
        # Unpacked by position: some engines hand a named tuple back as a plain one.
        total, loss, correct = self.forward(model, batch, readout)
        return Loss(total, loss, {"accuracy": correct})

    def costs(self, model: nn.Module, batch: Batch) -> Costs:
        loss, correct = row_losses(model, batch)
        return Costs(loss, {"accuracy": correct})

    def measures(self, means: dict[str, float], loader: Loader) -> dict[str, float]:
        """Returns perplexity and accuracy; of generated samples also the accuracy of a constant guess."""
        metrics = {"loss": means["loss"], "perplexity": math.exp(min(means["loss"], 700.0))}
        metrics[self.accuracy] = means["accuracy"]
        if (chance := loader.facts.chance_accuracy) is not None:
            metrics |= {"accuracy": means["accuracy"], "chance_accuracy": chance}
        return metrics

    def progress(self, metrics: Mapping[str, float]) -> list[str]:
        words = [f"perplexity {metrics['perplexity']:.2f}", *super().progress(metrics)]
        if "chance_accuracy" in metrics:
            words.append(f"accuracy {metrics['accuracy']:.1%} (chance {metrics['chance_accuracy']:.1%})")
        return words

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        """Says nothing of generated samples, of which the accuracies by length say more."""
        return [] if "chance_accuracy" in metrics else super().summary(metrics)


def row_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns what `row_cross_entropy` makes of each position that goes through the readout."""
    return forward(model, batch, partial(row_cross_entropy, **asked_of(batch)))


def asked_of(batch: Batch) -> dict[str, Tensor | None]:
    """Returns the targets of the positions that go through the readout, and what they weigh."""
    asked = {"targets": batch.labels.flatten(), "weights": None if batch.weights is None else batch.weights.flatten()}
    if batch.select is None:
        return asked
    return {name: None if values is None else values[batch.select] for name, values in asked.items()}


def refuse_masking(objective: ObjectiveConfig, instead: str) -> None:
    """Raises ValueError (one line) where shares of masking are given to a task that masks none, and says what it does
    `instead`."""
    given, none = (objective.masking, objective.evaluation_masking), ObjectiveConfig()
    theirs = "objective.masking, objective.evaluation_masking and ramp.masking are for masked_lm"
    require(given == (none.masking, none.evaluation_masking), f"{theirs}: {instead}; leave them out")


class CausalLM(TokenPrediction):
    """Each token is predicted from those before it."""

    architectures = ("language_model", "encoder_decoder")
    metrics = (BITS_PER_BYTE,)

    def __init__(self, objective: ObjectiveConfig) -> None:
        super().__init__(objective)
        refuse_masking(objective, f"{objective.name} hides no token")

    def measures(self, means: dict[str, float], loader: Loader) -> dict[str, float]:
        return super().measures(means, loader) | bits_per_byte(means["loss"], loader.facts.bytes_per_target)


class MaskedLM(TokenPrediction):
    """Some tokens are hidden and predicted from those on both sides."""

    architectures = ("encoder", "strand_encoder")
    accuracy = "masked_accuracy"
    metrics = (Metric(name="masked_accuracy", title="masked accuracy", unit="%", higher_is_better=True, digits=1),)

    def asks(self, split: str) -> dict[str, MaskingConfig]:
        return {"masking": self.objective.masking if split == "train" else self.objective.evaluation_masking}

    def example_batch(self, inputs: Tensor) -> Batch:
        select = torch.arange(max(1, int(inputs.numel() * self.target_share)))
        labels = torch.full_like(inputs, IGNORED)
        labels.view(-1)[select] = inputs.view(-1)[select]
        return dataclasses.replace(super().example_batch(inputs), labels=labels, select=select)

    @property
    def target_share(self) -> float:
        return self.objective.masking.probability

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        if "chance_accuracy" in metrics:
            return super().summary(metrics)
        return [
            f"Validation loss {metrics['loss']:.4f} nats per token (masked), "
            f"accuracy of masked tokens {metrics['masked_accuracy']:.1%}."
        ]
