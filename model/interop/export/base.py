"""The base class of all transformers classes, what they share of their inputs and outputs, and their losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
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


def tokens_or_embeddings(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """The one of the two that is given, which the models of this project both take as their inputs. Raises ValueError
    (one line) where it is none of them, or both."""
    if (input_ids is None) == (inputs_embeds is None):
        which = "neither" if input_ids is None else "both"
        raise ValueError(f"the model takes either input_ids or inputs_embeds, and was given {which} of them")
    if inputs_embeds is None:
        return input_ids
    if not inputs_embeds.is_floating_point():
        raise ValueError(f"inputs_embeds holds {inputs_embeds.dtype}, not vectors: pass token ids as input_ids")
    return inputs_embeds


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


def run_block(block: nn.Module, checkpoint: Callable[..., Any], *inputs: Any) -> Any:
    """The output of a block, which in training keeps its inputs only and computes the rest again for the gradients."""
    forward = partial(type(block).forward, block)
    return checkpoint(forward, *inputs) if block.training else forward(*inputs)


class MatmixPreTrainedModel(PreTrainedModel):
    """Base of the transformers classes: `self.model` is a matmix model."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def matmix_config(self) -> ModelConfig:
        """The configuration the model is built from."""
        return model_config_from_dict(self.config.matmix, vocab_size=self.config.vocab_size)

    def run(
        self, inputs: torch.Tensor, streams: list[torch.Tensor] | None, **more: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """What `self.model` gives, and the hidden states where there is a list for them."""
        return self.model(inputs, streams=streams, **more), self.hidden_states(streams)

    def streams(self, output_hidden_states: bool | None, output_attentions: bool | None) -> list[torch.Tensor] | None:
        """An empty list for the residual streams where hidden states are asked for, else None. The arguments are those
        of `forward`; None = as the configuration says."""
        if self.config.output_attentions if output_attentions is None else output_attentions:
            warnings.warn(
                "matmix models compute no attention matrices: output_attentions is without effect, and attentions is "
                "None; `matmix show-mixer` draws the matrices of all mixers",
                stacklevel=3,
            )
        return (
            [] if (self.config.output_hidden_states if output_hidden_states is None else output_hidden_states) else None
        )

    def hidden_states(self, streams: list[torch.Tensor] | None) -> tuple[torch.Tensor, ...] | None:
        """The streams (B, L, d_model) before the first layer and after each, the last one after the final norm."""
        return None if streams is None else (*streams[:-1], self.model.norm(streams[-1]))

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        """What transformers calls to switch it on and off: every n-th block then runs under the given function."""
        self.gradient_checkpointing = enable
        for index, block in enumerate(self.model.blocks):
            block.__dict__.pop("forward", None)
            if enable and index % every_n_layers == 0:
                # A partial function, which a copy of the model copies with it.
                block.forward = partial(run_block, block, gradient_checkpointing_func)

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
