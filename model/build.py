"""Builds a model from its configuration, and counts its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from matmix.model.backbone import Backbone
from matmix.model.config import ModelConfig


class _NoDraws(TorchFunctionMode):
    """Where torch's modules would draw their initial values. For tensors without memory, which have none, it would
    import its compiler first, for a second."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def build_model(config: ModelConfig, *, device: str | torch.device = "cpu") -> Backbone:
    """Builds the model of a configuration in float32 without initial values: call `initialize` on it, or load weights.
    With device="meta" nothing is allocated, whatever the size.
    """
    with torch.device(device), _NoDraws() if torch.device(device).type == "meta" else contextlib.nullcontext():
        return config.model_class(config)


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters of a model, tied ones counted once; no memory is allocated."""
    return sum(parameter.numel() for parameter in build_model(config, device="meta").parameters())
