"""Builds modules of this project from the weights of the papers' own code."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from matmix.model.architectures.encoder import Encoder
from matmix.model.architectures.language_model import LanguageModel
from matmix.model.config import ModelConfig
from matmix.model.interop.importing.hydra import hydra_layer_layout, hydra_mlm_layout
from matmix.model.interop.importing.layouts import ForeignConfig, Layout, rename_state
from matmix.model.interop.importing.lion import PublishedLionS, PublishedOrder, lion_attention_layout
from matmix.model.interop.importing.matrix_mixer import (
    ScalarAsVector,
    matrix_mixer_layout,
    scalar_as_vector,
)
from matmix.model.interop.importing.mru import mru_lm_layout
from matmix.model.mixers.scans.hydra import Hydra
from matmix.model.mixers.scans.lion import LionD, LionLit
from matmix.model.mixers.structured.matrix_mixer import MatrixMixer

KINDS = ("hydra-layer", "hydra-matrix-mixer", "hydra-mlm", "lion-attention", "mru-lm")


class FromReference(nn.Module):
    """A module that remembers how its parameters are called in the code they come from."""

    reference_names: dict[str, str]
    """Our parameter name -> the reference's."""

    def reference_gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of every parameter that has one, under the reference's name."""
        return {
            self.reference_names[name]: parameter.grad
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }


class ReferenceHydra(FromReference, Hydra):
    """A Hydra layer; its parameters are named like the reference's anyway."""


class ReferenceLionLit(PublishedOrder, FromReference, LionLit):
    """A LION layer without gates."""


class ReferenceLionD(PublishedOrder, FromReference, LionD):
    """A LION layer with a decay per head."""


class ReferenceLionS(PublishedOrder, FromReference, PublishedLionS):
    """A LION layer with selective gates, which get no gradient."""


class ReferenceMatrixMixer(ScalarAsVector, FromReference):
    """A block around a structured matrix; the class for each mixer is made when it is needed."""

    mixer: type[MatrixMixer]

    def __reduce__(self) -> tuple[Any, ...]:
        # No module holds the class by its name, where pickle would look for it.
        return empty_matrix_mixer, (self.mixer,), self.__dict__


@functools.cache
def reference_matrix_mixer(mixer: type[MatrixMixer]) -> type[ReferenceMatrixMixer]:
    """The class of the blocks with the matrix of `mixer`."""
    return type(f"Reference{mixer.__name__}", (ReferenceMatrixMixer, mixer), {"mixer": mixer})


def empty_matrix_mixer(mixer: type[MatrixMixer]) -> ReferenceMatrixMixer:
    """A block that pickle fills."""
    reference = reference_matrix_mixer(mixer)
    return reference.__new__(reference)


class ReferenceEncoder(FromReference, Encoder):
    """A Hydra encoder with masked-LM head."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, **options)


class ReferenceLanguageModel(FromReference, LanguageModel):
    """An mru-lm language model."""


def from_reference(kind: str, state: Mapping[str, torch.Tensor], **config: Any) -> FromReference:
    """One of our modules with a reference's weights, in float32 and eval mode.

    Args:
        kind: "hydra-layer", "hydra-matrix-mixer", "lion-attention" (take and return (B, L, d_model)), "hydra-mlm"
            or "mru-lm" (take token ids (B, L), return logits (B, L, vocab_size)).
        state: the reference's parameters by its own names.
        config: its constructor arguments; values may be text, as safetensors metadata has them.
    Returns: a module that also has `reference_names` and `reference_gradients()`. Its gradients are the reference's:
    a lion-attention layer of mask_type "Selective" learns nothing through its gates, and a_i has no gradient, as the
    authors detach them (the mixer lion_s does learn them).
    Raises: ValueError, one line, for an unknown kind, an unknown or missing key, or a shape that does not
    fit.
    """
    if kind == "hydra-layer":
        d_model, options, layout = hydra_layer_layout(config)
        Hydra.check(d_model, options)
        with torch.device("meta"):
            module = ReferenceHydra(d_model, options, causal=False, max_seqlen=0, output_std=0.02)
    elif kind == "hydra-matrix-mixer":
        mixer, d_model, options, length, layout = matrix_mixer_layout(config)
        state = scalar_as_vector(state)
        with torch.device("meta"):
            module = reference_matrix_mixer(mixer)(d_model, options, causal=False, max_seqlen=length, output_std=0.02)
    elif kind == "lion-attention":
        mixer, d_model, options, snake, layout = lion_attention_layout(state, config)
        reference = {LionLit: ReferenceLionLit, LionD: ReferenceLionD, PublishedLionS: ReferenceLionS}[mixer]
        with torch.device("meta"):
            module = reference(d_model, options, causal=False, max_seqlen=0, output_std=0.02)
        module.snake = snake
    elif kind in KINDS:
        model_config, layout = reference_layout(kind, state, config)
        with torch.device("meta"):
            module = (ReferenceEncoder if kind == "hydra-mlm" else ReferenceLanguageModel)(model_config)
    else:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        raise ValueError(f"unknown kind {kind!r}; " + (f"did you mean {near[0]!r}?" if near else f"known: {KINDS}"))
    renamed = rename_state(layout, dict(module.named_parameters()), state)
    module.load_state_dict({name: tensor.detach().float().clone() for name, tensor in renamed.items()}, assign=True)
    module.requires_grad_(True)
    module.reference_names = dict(layout.names)
    if isinstance(module, Encoder):
        # The reference's look-up gives no gradient to the padding token; its output projection does.
        module.embeddings.word.padding_idx = ForeignConfig(kind, config).get("pad_token_id", 0)
    return module.eval()


def reference_layout(
    kind: str, state: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> tuple[ModelConfig, Layout]:
    """Configuration and names of a whole model, kind "hydra-mlm" or "mru-lm"."""
    return (hydra_mlm_layout if kind == "hydra-mlm" else mru_lm_layout)(state, config)
