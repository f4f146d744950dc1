"""Layers held against their equations, written out by the tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def assert_layer_equals(mixer: nn.Module, reference: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> None:
    """Outputs and the gradients of x and of every parameter agree, in float64."""
    parameters = list(mixer.parameters())
    results = []
    for function in (mixer, lambda x: reference(mixer, x)):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
        results.append([y, *torch.autograd.grad(loss, [leaf, *parameters])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9 * other.abs().max().item())
