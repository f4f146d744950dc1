"""Prediction of masked tokens, for encoders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from matmix.data.labels import IGNORED
from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import MaskingConfig
from matmix.train.tasks.base import Metric
from matmix.train.tasks.token_prediction import TokenPrediction


class MaskedLM(TokenPrediction):
    """Some tokens are hidden and predicted from those on both sides."""

    architectures = ("encoder",)
    accuracy = "masked_accuracy"
    metrics = (Metric(name="masked_accuracy", title="masked accuracy", unit="%", higher_is_better=True, digits=1),)

    def asks(self, split: str) -> dict[str, MaskingConfig]:
        return {"masking": self.objective.masking if split == "train" else self.objective.evaluation_masking}

    def example_batch(self, inputs: torch.Tensor) -> Batch:
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
