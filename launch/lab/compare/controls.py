"""Controls: the same model without its mixers, and with only the short convolution that stands in front of them.

They show how much of a result the mixers are responsible for. Every comparison adds those that it lacks; each is the
recipe with other `model.layers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from matmix.model.config import NO_MIXER, ModelConfig
from matmix.model.mixers import MIXERS
from matmix.model.mixers.convolutions.short import Convolution

Control = Literal["no mixer", "convolution only"]
"""What a control is, and the name of the entry that is added."""


def control_of(model: ModelConfig) -> Control | None:
    """Which control a model is, if any."""
    mixers = model.mixer_names()
    if not mixers:
        return "no mixer"
    return "convolution only" if mixers == [Convolution.name] else None


def missing_controls(models: Sequence[ModelConfig]) -> dict[Control, dict[str, Any]]:
    """Name -> overrides of the controls that a comparison of these models lacks: "convolution only" where any of them
    has a mixer with a convolution in front, whose options it takes."""
    present = {control_of(model) for model in models}
    found: dict[Control, dict[str, Any]] = {}
    if "no mixer" not in present:
        found["no mixer"] = {"model": {"layers": [NO_MIXER]}}
    if "convolution only" not in present and (fronts := list(_fronts(models))):
        options = next((values for values in fronts if values is not None), {})
        found["convolution only"] = {"model": {"layers": [Convolution.name], "mixers": {Convolution.name: options}}}
    return found


def _fronts(models: Sequence[ModelConfig]) -> Iterable[dict[str, Any] | None]:
    """For each mixer with a convolution in front the options that the control takes from it; None where it cannot: of a
    causal one in an encoder, or a wider one than it knows."""
    names = [field.name for field in dataclasses.fields(Convolution.Config)]
    for model in models:
        for name in model.mixer_names():
            given = model.mixer_config(name)
            if not MIXERS[name].has_convolution(given):
                continue
            options = {key: getattr(given, key) for key in names if hasattr(given, key)}
            try:
                Convolution.check(model.d_model, Convolution.Config(**options))
            except ValueError:
                yield None
            else:
                yield options if model.mixer_is_causal(name) == model.causal else None
