"""Masked diffusion, by which an encoder learns to write (MDLM, arXiv 2406.07524; LLaDA, arXiv 2502.09992)."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.data.loading.masking import DiffusionMasking
from matmix.train.tasks.base import Metric
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.token_prediction import BITS_PER_BYTE, MaskedLM, bits_per_byte, refuse_masking


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
    metrics = (*MaskedLM.metrics, BITS_PER_BYTE)
    writes_with = ("--steps", "64")

    def __init__(self, objective: ObjectiveConfig) -> None:
        super().__init__(objective)
        draws = "masked_diffusion draws a rate of its own for each sample, from objective.options.least to 1"
        refuse_masking(objective, draws)

    def asks(self, split: str) -> dict[str, DiffusionMasking]:
        return {"masking": DiffusionMasking(least=self.options.least)}

    def count_targets(self, batch: Batch) -> int:
        return int((batch.weights > 0).sum())

    def example_batch(self, inputs: Tensor) -> Batch:
        weights = torch.full_like(inputs, 1 / self.target_share, dtype=torch.float32)
        return dataclasses.replace(super().example_batch(inputs), weights=weights)

    def measures(self, means: dict[str, float], loader: Loader) -> dict[str, float]:
        return super().measures(means, loader) | bits_per_byte(means["loss"], loader.facts.bytes_per_token)

    def summary(self, metrics: Mapping[str, float]) -> list[str]:
        bits = f", {metrics['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in metrics else ""
        return [
            f"Likelihood bound {metrics['loss']:.4f} nats per token (perplexity {metrics['perplexity']:.2f}{bits}), "
            f"accuracy of masked tokens {metrics['masked_accuracy']:.1%} over all rates."
        ]
