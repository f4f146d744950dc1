"""Loads a whole training state into plain or sharded tensors and their optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from matmix.train.engine.full_state import MODEL, OPTIMIZER, FullState
from matmix.train.optim.averaging import ENTRIES
from matmix.train.optim.base import Optimizer, is_sharded


@torch.no_grad()
def fill(tensor: torch.Tensor, state: FullState, key: str) -> None:
    """Copies the tensor `key` of `state` into a plain tensor or this rank's part of a DTensor, along whichever
    dimensions that is cut; if that of the state has fewer rows, into the first rows of the whole."""
    whole, shape, offset = tensor.shape, tensor.shape, (0,) * tensor.dim()
    if is_sharded(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
        tensor = tensor.to_local()
    if not shape:
        tensor.copy_(state.read(key).view(()))
        return
    row = math.prod(whole[1:])
    rows = min(shape[0], state.entries[key].shape[0] - offset[0])
    if rows > 0 and tensor.numel() > 0:
        values = state.read(key, offset[0] * row, (offset[0] + rows) * row).view(rows, *whole[1:])
        for dimension in range(1, len(shape)):
            values = values.narrow(dimension, offset[dimension], shape[dimension])
        tensor[:rows].copy_(values)


def load_weights(tensors: Iterable[tuple[str, torch.Tensor]], state: FullState) -> None:
    """Fills those parameters and buffers, given with their names, that `state` has, in place."""
    for name, tensor in tensors:
        if MODEL + name in state.entries:
            fill(tensor.detach(), state, MODEL + name)


def kept_entries(
    state: FullState, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, list[str]]:
    """Returns what of `state.moments()` `optimizer` takes up. Raises ValueError (one line) where it is another
    optimizer's.

    parameters: the model's, by name. An average of the weights may be missing, which then begins with the weights, and
    is left where none is kept.
    """
    known, held = optimizer.entries(parameters), state.moments()
    for name, entries in held.items():
        theirs = {entry: shape for entry, shape in entries.items() if entry not in ENTRIES}
        ours = {entry: tuple(one.shape) for entry, one in known.get(name, {}).items() if entry not in ENTRIES}
        if theirs != ours:
            raise ValueError(
                f"the checkpoint is of another optimizer: it keeps {_words(theirs)} of {name}, of which this run's "
                f"keeps {_words(ours)}; set optimizer.name, and the rules that name an optimizer, as they were"
            )
    return {name: [entry for entry in entries if entry in known[name]] for name, entries in held.items()}


def _words(entries: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" if shape else name for name, shape in sorted(entries.items())) or "nothing"


def state_to_fill(
    optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], state: FullState
) -> dict[str, torch.Tensor]:
    """Replaces all that an optimizer keeps by new tensors, as many as `state` has; its groups stay as they are. Returns
    these tensors by the keys of `state` that they are to be filled from.

    parameters: the model's, by name, sharded (DTensor) or not. One that `state` has no entries of begins anew. Raises
    as `kept_entries` does, before anything changes.
    """
    held = kept_entries(state, optimizer, parameters)
    optimizer.state.clear()
    wanted = {}
    for name, parameter, group in optimizer.named_parameters():
        if entries := held.get(name):
            new = optimizer.whole_state(parameter.detach(), group)
            optimizer.state[parameter] = {entry: new[entry] for entry in entries}
            wanted |= {f"{OPTIMIZER}{name}.{entry}": new[entry] for entry in entries}
    return wanted


def load_moments(optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], state: FullState) -> None:
    """Replaces all that an optimizer keeps by what `state` has of it; see `state_to_fill`."""
    for key, tensor in state_to_fill(optimizer, parameters, state).items():
        fill(tensor, state, key)
