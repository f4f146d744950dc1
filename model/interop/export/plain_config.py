"""A `ModelConfig` as nested plain values, for JSON, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from matmix.model.config import MixerOptions, ModelConfig
from matmix.model.mixers import MIXERS


def used_mixers(config: ModelConfig) -> frozenset[str]:
    """Names of the mixers in the model's pattern of layers."""
    return frozenset(name for name in config.layers if name in MIXERS)


def model_config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """Nested plain values, with the options of those mixers only that the model has."""
    values = dataclasses.asdict(config)
    used = used_mixers(config)
    values["mixers"] = {name: options for name, options in values["mixers"].items() if name in used}
    return values


def model_config_from_dict(values: Mapping[str, Any], **changes: Any) -> ModelConfig:
    """The inverse, with some fields changed. Raises ValueError if a value is not allowed or not known."""

    def frozen(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    values = {name: frozen(value) for name, value in {**values, **changes}.items()}
    options = values.pop("mixers", {})
    try:
        mixers = {
            name: MIXERS[name].Config(**{key: frozen(value) for key, value in given.items()})
            for name, given in options.items()
        }
        return ModelConfig(**values, mixers=MixerOptions(**mixers))
    except (KeyError, TypeError) as error:
        raise ValueError(f"this configuration of a model cannot be built by this version: {error}") from None
