"""Builds modules of this project from the weights of the papers' own code."""

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from matmix.model.architectures.encoder import Encoder
from matmix.model.interop.importing.hydra import hydra_layer_layout, hydra_mlm_layout
from matmix.model.interop.importing.layouts import ForeignConfig, Layout
from matmix.model.interop.importing.lion import lion_attention_layout
from matmix.model.interop.importing.matrix_mixer import matrix_mixer_layout
from matmix.model.interop.importing.mru import mru_lm_layout

KINDS: dict[str, Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], Layout]] = {
    "hydra-layer": hydra_layer_layout,
    "hydra-matrix-mixer": matrix_mixer_layout,
    "hydra-mlm": hydra_mlm_layout,
    "lion-attention": lion_attention_layout,
    "mru-lm": mru_lm_layout,
}
"""Kind -> the layout of a state and a configuration."""


class FromReference(nn.Module):
    """Goes before a class of this project, whose parameters have names and shapes of their own where they are from."""

    reference_names: dict[str, str]
    """Our parameter name -> the reference's."""
    reference_shapes: dict[str, torch.Size]
    """The reference's name -> its shape there."""

    def reference_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradient of every parameter that has one, under the reference's name and in its shape."""
        named = ((self.reference_names[name], parameter.grad) for name, parameter in self.named_parameters())
        return {name: grad.reshape(self.reference_shapes[name]) for name, grad in named if grad is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        # No module holds the class by its name, where pickle would look for it.
        return _empty, type(self).__bases__[1:], self.__dict__


@functools.cache
def _class_of(*bases: type[nn.Module]) -> type[FromReference]:
    return type(f"Reference{bases[-1].__name__}", (FromReference, *bases), {})


def _empty(*bases: type[nn.Module]) -> FromReference:
    """Makes a module that pickle fills."""
    kind = _class_of(*bases)
    return kind.__new__(kind)


def from_reference(kind: str, state: Mapping[str, torch.Tensor], **config: Any) -> FromReference:
    """Returns one of our modules with a reference's weights, in float32 and eval mode.

    Args:
        kind: "hydra-layer", "hydra-matrix-mixer", "lion-attention" (take and return (B, L, d_model)), "hydra-mlm"
            or "mru-lm" (take token ids (B, L), return logits (B, L, vocab_size)).
        state: the reference's parameters by its own names.
        config: its constructor arguments; values may be text, as safetensors metadata has them.
    Returns: a module that also has `reference_names` and `reference_gradients()`. Its gradients are the reference's:
    a lion-attention layer of mask_type "Selective" learns nothing through its gates (see `PublishedLionS`).
    Raises ValueError (one line) for an unknown kind, an unknown or missing key, or a shape that does not fit.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(KINDS)}"
        raise ValueError(f"unknown kind {kind!r}; {hint}")
    layout = KINDS[kind](state, config)
    with torch.device("meta"):
        module = _class_of(*layout.bases)(**layout.arguments)
    renamed = layout.renamed(dict(module.named_parameters()), state)
    module.load_state_dict({name: tensor.detach().float().clone() for name, tensor in renamed.items()}, assign=True)
    module.requires_grad_(True)
    module.reference_names = {name: layout.theirs(name) for name in renamed}
    module.reference_shapes = {name: state[name].shape for name in module.reference_names.values()}
    if isinstance(module, Encoder):
        # The reference's look-up gives no gradient to the padding token; its output projection does.
        module.embeddings.word.padding_idx = ForeignConfig(kind, config).get("pad_token_id", 0)
    return module.eval()
