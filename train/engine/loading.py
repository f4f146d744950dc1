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


def kept_entries(state: FullState, optimizer: Optimizer) -> dict[str, list[str]]:
    """Of `state.moments()` what `optimizer` takes up. Raises ValueError (one line) if it is another optimizer's.

    An average of the weights may be missing, which then begins with the weights, and is left where none is kept.
    """
    held = state.moments()
    known = {*optimizer.moments, *optimizer.counts}
    for name, entries in held.items():
        theirs, ours = ({*own} - ENTRIES for own in (entries, known))
        if theirs != ours:
            raise ValueError(
                f"the checkpoint is of another optimizer: it keeps {', '.join(sorted(theirs)) or 'nothing'} of {name}, "
                f"and {type(optimizer).__name__} keeps {', '.join(sorted(ours)) or 'nothing'}; set optimizer.name as "
                "it was"
            )
    return {name: [entry for entry in entries if entry in known] for name, entries in held.items()}


def load_moments(optimizer: Optimizer, names: Mapping[torch.Tensor, str], state: FullState) -> None:
    """Replaces all that a torch optimizer has kept; its options (weight decay and the like) stay.

    names: of the parameters, sharded (DTensor) or not. One that `state` has no moments of begins anew.
    """
    held = kept_entries(state, optimizer)
    contents = {**optimizer.state_dict(), "state": {}}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        name = names[parameter]
        for entry in held.get(name, ()):
            key = f"{OPTIMIZER}{name}.{entry}"
            # Every entry is either shaped (and sharded) like its parameter or a number.
            shaped = state.entries[key].shape == tuple(parameter.shape)
            value = torch.zeros_like(parameter.detach()) if shaped else torch.zeros(())
            fill(value, state, key)
            contents["state"].setdefault(number, {})[entry] = value
    optimizer.load_state_dict(contents)
