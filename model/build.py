"""Builds a model from its configuration, and counts its parameters."""

import contextlib

import torch

from matmix.model.backbone import Backbone
from matmix.model.config import ModelConfig
from matmix.model.initialization import NoDraws


def build_model(config: ModelConfig, *, device: str | torch.device = "cpu") -> Backbone:
    """Builds the model of a configuration in float32 without initial values: call `initialize` on it, or load weights.
    With device="meta" nothing is allocated, whatever the size.
    """
    with torch.device(device), NoDraws() if torch.device(device).type == "meta" else contextlib.nullcontext():
        return config.model_class(config)


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters of a model, tied ones counted once; no memory is allocated."""
    return sum(parameter.numel() for parameter in build_model(config, device="meta").parameters())
