"""Outputs and gradients of a module, to compare it with itself under another backend."""

from __future__ import annotations

import copy

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


def rounding(module, *inputs, **options):
    """By how much results change, as a share of their norm, where every parameter and input is rounded to float32: the
    most of four random roundings, computed in float64."""
    module = copy.deepcopy(module).double()
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    plain = results(module, "cpu", *inputs, **options)
    most = dict.fromkeys(plain, 0.0)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)

        def rounded(x, generator=generator):
            signs = 2 * torch.randint(2, x.shape, generator=generator) - 1
            return x * (1 + 2.0**-24 * signs) if x.is_floating_point() else x

        other = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.copy_(rounded(parameter))
        changed = results(other, "cpu", *map(rounded, inputs), **options)
        for name, x in plain.items():
            most[name] = max(most[name], float((changed[name] - x).norm() / x.norm()))
    return most


def assert_close(found, wanted, rounded):
    """Two orders of the same float32 arithmetic differ by a multiple of what a rounding of the inputs changes: 13 times
    that was seen over 8 seeds, 64 are allowed. rounded: by `rounding`."""
    assert found.keys() == wanted.keys()
    errors = {name: float((x - wanted[name]).norm() / wanted[name].norm()) for name, x in found.items()}
    assert not {name: error for name, error in errors.items() if not error < 64 * rounded[name] + 1e-6}
