"""Which parameters bfloat16 rounds: those that autocast casts before anything is computed with them, so that they may
as well be sent so. All others are used as they are kept: decay rates, step sizes, norms, gates (`ExactLinear`) and
tables."""

import torch
from torch import nn


def rounded_parameters(model: nn.Module) -> set[str]:
    """Returns the names of the parameters that a forward pass under bfloat16 autocast casts before each use: weights of
    `nn.Linear`, and what modules name in an attribute `rounded`."""
    rounded, exact = {}, set()
    for prefix, module in model.named_modules():
        names = ("weight",) if type(module) is nn.Linear else getattr(module, "rounded", ())
        for name, parameter in module.named_parameters(recurse=False):
            if name in names:
                rounded[f"{prefix}.{name}" if prefix else name] = parameter
            else:
                exact.add(parameter)  # under any of its names
    return {name for name, parameter in rounded.items() if parameter not in exact}


def round_weights(model: nn.Module) -> None:
    """Puts rounded copies in place of those parameters, as they are where ranks have sent them; their gradients are
    float32."""
    for name in rounded_parameters(model):
        owner, _, own = name.rpartition(".")
        weight = nn.Parameter(model.get_parameter(name).detach().bfloat16())
        weight.grad_dtype = torch.float32
        setattr(model.get_submodule(owner), own, weight)
