"""States that are carried from rows to the rows that continue them, so that a document longer than a row is read on in
the next step (truncated back-propagation through time: no gradient passes a row's edge)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from matmix.kernels.functions import working
from matmix.model.config import ModelConfig
from matmix.model.mixers import MIXERS


def check_carry(config: ModelConfig) -> None:
    """Raises ValueError (one line) for a model whose layers have no states that enter rows."""
    if not config.causal:
        raise ValueError(
            f"data.carry: a model of {config.architecture} reads rows from both ends, so that no state enters them; "
            "leave it out, or train a language_model"
        )
    for name in config.mixer_names():
        if not MIXERS[name].carries:
            raise ValueError(
                f"data.carry: {name} has no state of fixed size that documents could go on from; leave it out, or take "
                f"mixers that have: {', '.join(name for name, mixer in MIXERS.items() if mixer.carries)}"
            )


def widened(state: Tensor) -> Tensor:
    """A tensor of a state as it is carried and saved: float32 at least, whatever the weights are rounded to."""
    return working(state) if state.is_floating_point() else state


@dataclasses.dataclass(eq=False)
class LayerStates:
    """The states of one layer at the edges of B rows of a packed batch."""

    entering: Any
    """(B, ...) behind the rows before, in nested lists and tuples; None = those before any token."""
    continues: Tensor
    """bool (B,): the row goes on with the document that the row before ended in."""
    first: Tensor
    """int64 (B,): the first document of each row."""
    last: Tensor
    """int64 (B,): the last one."""
    leaving: Any = None
    """(B, ...) behind these rows, once the layer has run; without gradients."""

    def of_documents(self, fresh: Any) -> Any:
        """Returns the states before all documents, `widened`. fresh: (documents, ...) those before any token."""
        fresh = tree_map(widened, fresh)
        if self.entering is None:
            return fresh
        return tree_map(self._entered, fresh, self.entering)

    def _entered(self, fresh: Tensor, entering: Tensor) -> Tensor:
        continues = self.continues.view(-1, *[1] * (fresh.dim() - 1))
        # Chosen, not multiplied: a state that is not finite ends with its document.
        return fresh.index_copy(0, self.first, torch.where(continues, entering, fresh[self.first]))

    def leave(self, states: Any) -> None:
        """Takes up the states behind all documents, `widened`."""
        self.leaving = tree_map(lambda state: widened(state.detach()[self.last]), states)


@dataclasses.dataclass(eq=False)
class CarriedRows:
    """What is carried between micro-batches of B rows, each of which may continue the row of the same number before it.
    A forward pass that is given this replaces the states by those behind its rows."""

    states: list[Any] | None = None
    """Of each layer, as in `LayerStates.entering`; None = those before any token."""
    continues: Tensor | None = None
    """bool (B,): which of the next rows go on."""

    def of_layers(self, layers: int, cu_seqlens: Tensor, batch: int, length: int) -> list[LayerStates]:
        """Returns what enters each layer. cu_seqlens: of the B = batch rows of so many tokens, one after the other, all
        of whose edges are boundaries. No value is read on the host."""
        edges = length * torch.arange(batch + 1, device=cu_seqlens.device)
        bounds = cu_seqlens.long()
        first = torch.searchsorted(bounds, edges[:-1], right=True) - 1
        last = torch.searchsorted(bounds, edges[1:]) - 1
        return [LayerStates(state, self.continues, first, last) for state in self.states or [None] * layers]
