"""States that are carried from rows to the rows that continue them, so that a document longer than a row is read on in
the next step (truncated back-propagation through time: no gradient passes a row's edge)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from matmix.kernels.context import Context
from matmix.kernels.functions import working
from matmix.model.config import ModelConfig
from matmix.model.mixers import MIXERS


def check_carry(config: ModelConfig) -> None:
    """Raises ValueError (one line) for a model whose layers have no states that enter rows."""
    if not config.causal or config.model_class.separated:
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
        longest = MIXERS[name].longest_document(config.mixer_config(name), config.longest)
        if longest is not None:
            raise ValueError(
                f"data.carry: {name} takes documents of {longest} tokens at most, and those that are carried have any "
                "length; leave it out, or take another feature_map"
            )


def widened(state: Tensor) -> Tensor:
    """A tensor of a state as it is carried and saved: float32 at least, whatever the weights are rounded to."""
    return working(state) if state.is_floating_point() else state


@dataclasses.dataclass(eq=False)
class LayerStates:
    """The states of one layer at the edges of B rows of a packed batch, or of those that a part of it has."""

    entering: Any
    """(B, ...) behind the rows before, in nested lists and tuples; None = those before any token."""
    continues: Tensor
    """bool (B,): the row goes on with the document that the row before ended in."""
    first: Tensor
    """int64 (B,): the first document of each row; the number of documents where it does not lie here."""
    last: Tensor
    """int64 (B,): the last one; any where it does not end here."""
    ends: Tensor | None
    """bool (B,): the row ends here; None = all do."""
    leaving: Any = None
    """(B, ...) behind these rows, once the layer has run; without gradients. Zeros for rows that end elsewhere."""

    def of_documents(self, fresh: Any) -> Any:
        """Returns the states before all documents, `widened`. fresh: (documents + 1, ...) those before any token; the
        last place is for rows that are not here."""
        fresh = tree_map(widened, fresh)
        entered = fresh if self.entering is None else tree_map(self._entered, fresh, self.entering)
        return tree_map(lambda state: state[:-1], entered)

    def _entered(self, fresh: Tensor, entering: Tensor) -> Tensor:
        continues = self.continues.view(-1, *[1] * (fresh.dim() - 1))
        # Chosen, not multiplied: a state that is not finite ends with its document.
        return fresh.index_copy(0, self.first, torch.where(continues, entering, fresh[self.first]))

    def leave(self, states: Any) -> None:
        """Takes up the states behind all documents, `widened`."""
        self.leaving = tree_map(self._left, states)

    def _left(self, states: Tensor) -> Tensor:
        state = widened(states.detach()[self.last])
        return state if self.ends is None else state.masked_fill(~self.ends.view(-1, *[1] * (state.dim() - 1)), 0)


@dataclasses.dataclass(eq=False)
class CarriedRows:
    """What is carried between micro-batches of B rows, each of which may continue the row of the same number before it.
    A forward pass that is given this replaces the states by those behind its rows."""

    states: list[Any] | None = None
    """Of each layer, as in `LayerStates.entering`; None = those before any token."""
    continues: Tensor | None = None
    """bool (B,): which of the next rows go on."""

    def of_layers(
        self, layers: int, cu_seqlens: Tensor, tokens: int, context: Context | None = None
    ) -> list[LayerStates]:
        """Returns what enters each layer. cu_seqlens: of the rows one after the other, all of whose edges are
        boundaries, or of this rank's part of them; tokens: here. No value is read on the host."""
        rows, (rank, ranks) = len(self.continues), (0, 1) if context is None else (context.rank, context.size)
        edges = ranks * tokens // rows * torch.arange(rows + 1, device=cu_seqlens.device) - rank * tokens
        starts, stops, bounds = edges[:-1], edges[1:], cu_seqlens.long()
        first = (torch.searchsorted(bounds, starts, right=True) - 1) % len(bounds)
        last = (torch.searchsorted(bounds, stops) - 1).clamp(0, len(bounds) - 2)
        ends = None if context is None else (stops > 0) & (stops <= tokens)
        return [LayerStates(state, self.continues, first, last, ends) for state in self.states or [None] * layers]

    def take(self, layers: list[LayerStates], context: Context | None = None) -> None:
        """Takes up the states behind the rows. Each ends on one rank of a context, whose states all are given: a sum
        with zeros."""
        self.states = [layer.leaving for layer in layers]
        if context is not None:
            left = [state for state in tree_leaves(self.states) if state is not None]
            for work in [dist.all_reduce(state, group=context.group, async_op=True) for state in left]:
                work.wait()
