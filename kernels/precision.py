"""Runs an op in the precision that it chooses itself, also under autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def outside_autocast(function: Callable) -> Callable:
    """Runs `function` with autocast off for the device of its first tensor.

    The PyTorch forms compute in float32 (or float64) whatever their inputs are; autocast would reach into them
    and round their products to bfloat16.
    """

    @functools.wraps(function)
    def run(*arguments, **options):
        device = next(x.device.type for x in arguments if isinstance(x, torch.Tensor))
        if device == "meta" or not torch.is_autocast_enabled(device):
            return function(*arguments, **options)
        with torch.autocast(device, enabled=False):
            return function(*arguments, **options)

    return run


def working(x: torch.Tensor) -> torch.Tensor:
    """float32, or float64 for float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
