"""The base class of the transformers classes of language models and encoders, and their losses."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from matmix.model.config import ModelConfig, model_config_from_dict
from matmix.model.initialization import default_init_rule


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in float32 of logits (..., vocab_size) against labels (...); torch ignores labels of -100."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten().to(logits.device))


def refuse_input_embeddings(inputs_embeds: torch.Tensor | None) -> None:
    """Raise ValueError where embeddings are given in place of token ids."""
    if inputs_embeds is not None:
        raise ValueError("inputs_embeds is not supported: pass input_ids")


def classification_loss(logits: torch.Tensor, labels: torch.Tensor, problem: str | None) -> torch.Tensor:
    """The loss of logits (B, num_labels) in float32, as transformers' own classes have it.

    problem: "regression", labels (B,) or (B, num_labels) values; "single_label_classification", labels (B,) classes;
    "multi_label_classification", labels (B, num_labels) 0 or 1; None = regression with one label, else by the type of
    the labels.
    """
    if problem is None and logits.shape[-1] == 1:
        problem = "regression"
    if problem is None:
        problem = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    logits, labels = logits.float(), labels.to(logits.device)
    if problem == "regression":
        return F.mse_loss(logits.flatten(), labels.to(logits.dtype).flatten())
    if problem == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    return F.cross_entropy(logits, labels.long().flatten())


class MatmixPreTrainedModel(PreTrainedModel):
    """Base of the transformers classes: `self.model` is a matmix model."""

    base_model_prefix = "model"
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def matmix_config(self) -> ModelConfig:
        """The configuration the model is built from."""
        return model_config_from_dict(self.config.matmix, vocab_size=self.config.vocab_size)

    def run(
        self, input_ids: torch.Tensor, output_hidden_states: bool | None, **inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """What `self.model` gives, and where they are asked for the streams (B, L, d_model) before the first layer and
        after each, the last one after the final norm. output_hidden_states: None = as the configuration says."""
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        streams: list[torch.Tensor] | None = [] if wanted else None
        outputs = self.model(input_ids, streams=streams, **inputs)
        return outputs, None if streams is None else (*streams[:-1], self.model.norm(streams[-1]))

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
