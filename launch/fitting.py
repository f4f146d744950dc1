"""Settings of a fine-tuning that neither a recipe nor the command line gives: they fit the model and the examples, so
that a first try on a few examples, or with a small model, learns something."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Container, Mapping
from typing import Any

from matmix.train.config import RunConfig
from matmix.train.loaders import make_loader

logger = logging.getLogger(__name__)

LEAST_STEPS = 300
"""Of a fine-tuning with few examples, which are read again and again."""
EPOCHS, EPOCHS_OF_IMAGES = 3.0, 30.0
"""Of a fine-tuning with many examples: those of the BERT papers, and ours of pictures."""
_RATE, _RATE_OF_IMAGES, _WIDTH = 5e-5, 1e-4, 768
"""What base models, whose width that is, are fine-tuned with."""
_HIGHEST = 2e-3


def with_fitted_rate(values: dict[str, Any], width: int, *, on_images: bool) -> None:
    """Sets optimizer.lr, unless a recipe does: small models need larger rates."""
    values.setdefault("optimizer", {}).setdefault("lr", fitted_rate(width, on_images=on_images))


def fitted_rate(width: int, *, on_images: bool = False) -> float:
    """Peak learning rate for a model of d_model = `width`: that of base models at their width, falling with its square,
    and never above 2e-3."""
    rate = (_RATE_OF_IMAGES if on_images else _RATE) * (_WIDTH / width) ** 2
    return float(f"{min(rate, _HIGHEST):.2g}")


def with_fitted_steps(
    config: RunConfig, recipe: Mapping[str, Any], typed: Container[str], *, on_images: bool
) -> RunConfig:
    """`config` with as many epochs as give `LEAST_STEPS` steps or the usual number of epochs, whichever is more; as it
    is where the recipe or the command line (its options, `typed`) say epochs or steps. Raises as `make_loader`."""
    if any(name in recipe or f"--{name}" in typed for name in ("epochs", "steps")):
        return config
    loader = make_loader(config, "train", 0, 1)
    loader.close()
    examples, usual = loader.samples_per_epoch, EPOCHS_OF_IMAGES if on_images else EPOCHS
    needed = math.ceil(10 * LEAST_STEPS * config.global_batch_size / examples) / 10
    if needed > usual:
        logger.info(
            f"{examples:,} examples are few: {needed:g} epochs in place of {usual:g}, so that there are {LEAST_STEPS} "
            "steps; --epochs or --steps say otherwise"
        )
    return dataclasses.replace(config, epochs=max(usual, needed))
