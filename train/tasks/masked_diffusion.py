"""Masked diffusion, by which an encoder learns to write (MDLM, arXiv 2406.07524; LLaDA, arXiv 2502.09992)."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import DiffusionMasking
from matmix.train.tasks.base import Metric
from matmix.train.tasks.token_prediction import MaskedLM


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedDiffusionOptions:
    least: float = 1e-3
    """Rates of masking below it are raised to it: no prediction weighs more than 1 / least."""

    def __post_init__(self) -> None:
        if not 0 < self.least <= 1:
            raise ValueError(f"objective.options.least must be above 0 and at most 1, got {self.least}")


class MaskedDiffusion(MaskedLM):
    """Each sample is masked at a rate t of its own, and what its masked tokens cost weighs 1/t. Over all ordinary
    tokens, masked or not, the loss is then a bound from above on -log p(text | its special tokens), in nats per token.
    All sums are weighted alike: the accuracy is the mean over the rates of that of masked tokens.
    """

    Options = MaskedDiffusionOptions
    modalities = ("text",)
    target_share = 0.5
    loss_metric = Metric(name="loss", title="likelihood bound", unit="nats per token")
    writes_with = ("--steps", "64")

    def asks(self, split: str) -> dict[str, DiffusionMasking]:
        return {"masking": DiffusionMasking(least=self.options.least)}

    def count_targets(self, batch: Batch) -> int:
        return int((batch.weights > 0).sum())

    def example_batch(self, inputs: Tensor) -> Batch:
        weights = torch.full_like(inputs, 1 / self.target_share, dtype=torch.float32)
        return dataclasses.replace(super().example_batch(inputs), weights=weights)

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        return [
            f"Likelihood bound {metrics['loss']:.4f} nats per token (perplexity at most {metrics['perplexity']:.2f}), "
            f"accuracy of masked tokens {metrics['masked_accuracy']:.1%} over all rates."
        ]
