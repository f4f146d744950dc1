"""What the transformers classes of language models and encoders share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from matmix.model.config import MixerOptions, ModelConfig
from matmix.model.initialization import default_init_rule
from matmix.model.mixers import MIXERS


def model_config_from_dict(values: Mapping[str, Any], **changes: Any) -> ModelConfig:
    """A `ModelConfig` from the nested plain values of a JSON file, with some fields changed.

    Raises ValueError if a layer needs a mixer that is not there, or a value is not allowed.
    """

    def frozen(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    values = {name: frozen(value) for name, value in {**values, **changes}.items()}
    options = values.pop("mixers", {})
    mixers = {
        name: MIXERS[name].Config(**{key: frozen(value) for key, value in options[name].items()})
        for name in options
        if name in MIXERS
    }
    return ModelConfig(**values, mixers=MixerOptions(**mixers))


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in float32 of logits (..., vocab_size) against labels (...), -100 = ignored."""
    return F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten().to(logits.device), ignore_index=-100
    )


def refuse_input_embeddings(inputs_embeds: torch.Tensor | None) -> None:
    """Raise ValueError where embeddings are given in place of token ids."""
    if inputs_embeds is not None:
        raise ValueError("inputs_embeds is not supported: pass input_ids")


class MatmixPreTrainedModel(PreTrainedModel):
    """A matmix model, in `self.model`, in the dress of transformers."""

    base_model_prefix = "model"
    _no_split_modules = ("Block",)

    def matmix_config(self) -> ModelConfig:
        """The configuration the model is built from."""
        return model_config_from_dict(self.config.matmix, vocab_size=self.config.vocab_size)

    def _init_weights(self, module: nn.Module) -> None:
        """Initial values for what is not loaded, by the rules that training from scratch uses."""
        rules: dict[str, Any] = {}
        # Owners come outermost first, and the outermost rule wins.
        for owner in self.modules():
            for name, rule in getattr(owner, "init_rules", {}).items():
                path, _, leaf = name.rpartition(".")
                if not path or path in dict(owner.named_modules()):
                    if owner.get_submodule(path) is module:
                        rules.setdefault(leaf, rule)
        for name, parameter in module.named_parameters(recurse=False):
            # Newer versions of transformers mark parameters that came from a file, older ones whole modules.
            if not getattr(parameter, "_is_hf_initialized", False):
                rule = rules.get(name) or default_init_rule(module, name)
                with torch.no_grad():
                    parameter.copy_(rule(parameter.shape, None))
