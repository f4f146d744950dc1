"""The base class of all transformers classes, and what they share of their outputs."""

import warnings
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import LabelSmoother

from matmix.model.backbone import Backbone
from matmix.model.config import model_config_from_dict
from matmix.model.initialization import default_init_rule
from matmix.model.interop.export.config import MatmixConfig
from matmix.model.interop.export.inputs import Count, documents, tokens_or_embeddings
from matmix.model.parameter_rules import stated_rules

SMOOTHING_COUNTS = "num_items_in_batch" in signature(LabelSmoother.__call__).parameters
"""Whether this version of transformers divides smoothed losses as others; it takes the labels from the model."""


Texts = tuple[Tensor | None, ...]
"""input_ids, inputs_embeds, attention_mask and position_ids."""


def run_block(block: nn.Module, checkpoint: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """The output of a block, which in training keeps its inputs only and computes the rest again for the gradients."""
    forward = partial(type(block).forward, block, **options)
    return checkpoint(forward, *inputs) if block.training else forward(*inputs)


class MatmixPreTrainedModel(PreTrainedModel):
    """Base of the transformers classes: `self.model` is a matmix model."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    # Attention is PyTorch's scaled_dot_product_attention, which is also what "eager" gets.
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    # Added to in place, which a copy on another device would not be.
    _skip_keys_device_placement: ClassVar[list[str]] = ["streams"]
    one_text_a_row: ClassVar[bool] = False
    """What it gives is one answer for each row."""
    inner_class: type[Backbone]
    """The class of `self.model`."""
    words: ClassVar[str] = ""
    """The name of its embedding, where it reads tokens."""

    def __init__(self, config: MatmixConfig):
        """Raises ValueError (one line) where the weights are not what tie_word_embeddings says."""
        super().__init__(config)
        tied, wanted = config.matmix.get("tie_embeddings", True), config.tie_word_embeddings
        if wanted != tied:
            raise ValueError(f"tie_word_embeddings = {wanted}: the model has {tied} in its weights; leave it at that")
        self.model = self.inner_class(model_config_from_dict(config.matmix, vocab_size=config.vocab_size))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_submodule(self.words) if self.words else super().get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        owner, _, name = self.words.rpartition(".")
        setattr(self.model.get_submodule(owner), name, value)

    def run(self, inputs: Tensor, keywords: dict[str, Any], **more: Any) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Returns the outputs of `self.model`, and the hidden states where keywords, as of `streams`, ask for them."""
        streams = self.streams(keywords)
        return self.model(inputs, streams=streams, **more), self.hidden_states(streams)

    def run_text(self, texts: Texts, keywords: dict[str, Any], **more: Any) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Does `run` on texts, each a row or, where positions say so, several in a row."""
        input_ids, inputs_embeds, attention_mask, position_ids = texts
        inputs = tokens_or_embeddings(input_ids, inputs_embeds)
        layout = documents(tuple(inputs.shape[:2]), attention_mask, position_ids, keywords)
        if layout["cu_seqlens"] is not None and self.one_text_a_row:
            raise ValueError(f"{type(self).__name__} has one answer for each row: give each text a row of its own")
        return self.run(inputs, keywords, **layout, **more)

    def loss(
        self, function: Callable[..., Tensor], outputs: Tensor, labels: Tensor | None, count: Count | None
    ) -> Tensor | None:
        """Returns function(outputs, labels, count=count); None without labels."""
        if labels is not None:
            return function(outputs, labels, count=count)
        if self.training and count is not None and not SMOOTHING_COUNTS:
            warnings.warn(
                "num_items_in_batch without labels: where these are smoothed (label_smoothing_factor), this version of "
                "transformers does not divide by it, and steps are too large by the number of batches that are "
                "accumulated and of processes; give Trainer a compute_loss_func that divides",
                stacklevel=4,
            )
        return None

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that training in matmix does not decay: vectors, and rates, frequencies and the like,
        smaller values of which are another layer and not a simpler one. (As timm's models name theirs.)"""
        rules = stated_rules(self, self.config.matmix.get("max_seqlen", 1))
        named = {name for name, (_, rule) in rules.items() if rule.weight_decay == 0}
        return named | {name for name, parameter in self.named_parameters() if parameter.dim() < 2}

    def streams(self, keywords: dict[str, Any]) -> list[Tensor] | None:
        """Returns an empty list for the residual streams where hidden states are asked for, else None.

        keywords: what `forward` has no use of its own for: output_hidden_states and output_attentions (None = as the
        configuration says), is_causal, as the model is, num_items_in_batch, which only losses need, and skip_logits,
        with which Trainer allows models to leave them out. Raises ValueError (one line) for others.
        """
        asked = {}
        for name in ("output_hidden_states", "output_attentions"):
            given = keywords.pop(name, None)
            asked[name] = getattr(self.config, name) if given is None else given
        is_causal = keywords.pop("is_causal", None)
        if is_causal is not None and bool(is_causal) != self.model.causal:
            raise ValueError(f"is_causal = {is_causal}: {type(self).__name__} is what its mixers make it; leave it out")
        for name, value in keywords.items():
            if value is not None and value is not False and name not in ("num_items_in_batch", "skip_logits"):
                raise ValueError(f"{type(self).__name__} has no use for {name}: leave it out")
        if asked["output_attentions"]:
            warnings.warn(
                "matmix models compute no attention matrices: output_attentions is without effect, and attentions is "
                "None; `matmix show-mixer` draws the matrices of all mixers",
                stacklevel=4,
            )
        return [] if asked["output_hidden_states"] else None

    def hidden_states(self, streams: list[Tensor] | None) -> tuple[Tensor, ...] | None:
        """The streams (B, L, d_model) before the first layer and after each, the last one after the final norm."""
        return None if streams is None else (*streams[:-1], self.model.norm(streams[-1]))

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        """Switches checkpointing on and off for transformers: every n-th block then runs under the given function."""
        self.gradient_checkpointing = enable
        for index, block in enumerate(self.model.blocks):
            # The forward pass itself is called so where the hooks of accelerate stand in `forward`.
            place = "_old_forward" if hasattr(block, "_hf_hook") else "forward"
            block.__dict__.pop(place, None)
            if enable and index % every_n_layers == 0:
                # A partial function, which a copy of the model copies with it.
                setattr(block, place, partial(run_block, block, gradient_checkpointing_func))
            elif place == "_old_forward":
                block._old_forward = partial(type(block).forward, block)

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
                rule = rules.get(name) or default_init_rule(module, name, self.model.config.matrix_std)
                with torch.no_grad():
                    parameter.copy_(rule(parameter.shape, None))


class PredictsTokens:
    """Before a class with an output for each token of the vocabulary, which may be the embedding."""

    def get_output_embeddings(self) -> nn.Module:
        return self.get_input_embeddings() if self.config.tie_word_embeddings else self.model.output

    def set_output_embeddings(self, value: nn.Module) -> None:
        if not self.config.tie_word_embeddings:
            self.model.output = value
