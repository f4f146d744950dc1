"""Builds a model from its configuration, counts its parameters, and finds the configuration at another width."""

import dataclasses
import math

import torch
from torch import nn

from matmix.model.backbone import Backbone
from matmix.model.config import ModelConfig
from matmix.model.initialization import NoDraws
from matmix.model.mixers import MIXERS

HEADDIM_FACTOR = 1.5
"""How far the headdim of a mixer may be from its own at another width, either way."""


def build_model(config: ModelConfig, *, device: str | torch.device = "cpu") -> Backbone:
    """Builds the model of a configuration in float32 without initial values: call `initialize` on it, or load weights.
    Until then its parameters are NaN, so that what forgets it shows. With device="meta" nothing is allocated, whatever
    the size.
    """
    with torch.device(device), NoDraws(), torch.no_grad():
        model = config.model_class(config)
        if torch.device(device).type != "meta":
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
    return model


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters of a model, tied ones counted once; no memory is allocated."""
    return parameters_of(build_model(config, device="meta"))


def parameters_of(model: Backbone, *, embeddings: bool = True) -> int:
    """The number of parameters of a model, tied ones counted once. embeddings: with the tables that have a row for each
    token, position or output, without which a size does not depend on the vocabulary."""
    left_out: set[int] = set()
    if not embeddings:
        tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
        rows = [parameter for table in tables for parameter in table.parameters()]
        left_out = {id(tensor) for tensor in (*rows, *model.output_projection()) if tensor is not None}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in left_out)


def headdims(model: ModelConfig) -> dict[str, int]:
    """Returns the headdim of each mixer in the layers that has one."""
    options = {name: model.mixer_config(name) for name in model.mixer_names()}
    return {name: option.headdim for name, option in options.items() if hasattr(option, "headdim")}


def at_width(model: ModelConfig, width: int) -> ModelConfig | None:
    """Returns the model with this d_model, and with the headdims nearest to its own that fit it; None where none do."""
    options = model.mixers
    for name, nominal in headdims(model).items():
        low, high = math.ceil(nominal / HEADDIM_FACTOR), math.floor(nominal * HEADDIM_FACTOR)
        nearest_first = sorted(range(max(1, low), high + 1), key=lambda one, own=nominal: (abs(one - own), one))
        for headdim in nearest_first:
            changed = dataclasses.replace(getattr(options, name), headdim=headdim)
            try:
                MIXERS[name].check(width, changed)
            except ValueError:
                continue
            options = dataclasses.replace(options, **{name: changed})
            break
        else:
            return None
    try:
        return dataclasses.replace(model, d_model=width, mixers=options)
    except ValueError:  # another option that does not fit this width
        return None
