"""From a configuration to a model."""

from __future__ import annotations

import torch

from matmix.model.backbone import Backbone
from matmix.model.config import ModelConfig


def build_model(config: ModelConfig, *, device: str | torch.device = "cpu") -> Backbone:
    """The model of a configuration, in float32, its weights not yet set: call `initialize`, or load some.

    With device="meta" nothing is allocated, whatever the size.
    """
    with torch.device(device):
        return config.model_class(config)


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, tied ones once; nothing is allocated."""
    return sum(parameter.numel() for parameter in build_model(config, device="meta").parameters())
