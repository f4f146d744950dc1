"""Next-token prediction, for language models."""

from __future__ import annotations

import math

from matmix.data.loading.loader import Loader
from matmix.train.tasks.base import Metric
from matmix.train.tasks.token_prediction import TokenPrediction


class CausalLM(TokenPrediction):
    """Each token is predicted from those before it."""

    architectures = ("language_model",)
    metrics = (Metric(name="bits_per_byte", title="bits per byte", unit="bits per byte", digits=3),)

    def measures(self, means: dict[str, float], loader: Loader) -> dict[str, float]:
        metrics = super().measures(means, loader)
        if (size := loader.facts.bytes_per_target) is not None:
            metrics["bits_per_byte"] = means["loss"] / math.log(2) / size
        return metrics
