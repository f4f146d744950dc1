"""Outputs and gradients of a module, to compare it with itself under another backend."""

from __future__ import annotations

import torch


def results(module, device, *inputs, **options):
    """Output and gradients of all parameters, and of the input where it has any."""
    module.to(device).zero_grad()
    options = {name: x.to(device) for name, x in options.items() if x is not None}
    inputs = [x.to(device, copy=True).requires_grad_(x.is_floating_point()) for x in inputs]
    y = module(*inputs, **options)
    (y * torch.linspace(-1, 1, y.numel(), device=device).view(y.shape)).sum().backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    found |= {f"input {i}": x.grad for i, x in enumerate(inputs) if x.requires_grad}
    return {name: x.cpu().clone() for name, x in ({"output": y.detach()} | found).items()}


def assert_close(found, wanted, bound=1e-5):
    """Up to the ratio of root mean squares."""
    assert found.keys() == wanted.keys()
    errors = {name: float((x - wanted[name]).norm() / wanted[name].norm()) for name, x in found.items()}
    assert not {name: error for name, error in errors.items() if not error < bound}
