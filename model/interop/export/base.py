"""The base class of the transformers classes of language models and encoders."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from matmix.model.config import ModelConfig, model_config_from_dict
from matmix.model.initialization import default_init_rule


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in float32 of logits (..., vocab_size) against labels (...), -100 = ignored."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten().to(logits.device), ignore_index=-100)


def refuse_input_embeddings(inputs_embeds: torch.Tensor | None) -> None:
    """Raise ValueError where embeddings are given in place of token ids."""
    if inputs_embeds is not None:
        raise ValueError("inputs_embeds is not supported: pass input_ids")


class MatmixPreTrainedModel(PreTrainedModel):
    """Base of the transformers classes: `self.model` is a matmix model."""

    base_model_prefix = "model"
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def matmix_config(self) -> ModelConfig:
        """The configuration the model is built from."""
        return model_config_from_dict(self.config.matmix, vocab_size=self.config.vocab_size)

    def _init_weights(self, module: nn.Module) -> None:
        """Initial values for what is not loaded, by the rules that training from scratch uses."""
        rules: dict[str, Any] = {}
        # Owners come outermost first, and the outermost rule wins.
        for owner in self.modules():
            inner = dict(owner.named_modules())
            for name, rule in getattr(owner, "init_rules", {}).items():
                path, _, leaf = name.rpartition(".")
                if inner.get(path) is module:
                    rules.setdefault(leaf, rule)
        for name, parameter in module.named_parameters(recurse=False):
            # Newer versions of transformers mark parameters that came from a file, older ones whole modules.
            if not getattr(parameter, "_is_hf_initialized", False):
                rule = rules.get(name) or default_init_rule(module, name)
                with torch.no_grad():
                    parameter.copy_(rule(parameter.shape, None))
