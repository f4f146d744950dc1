"""A whole training state, tensor by tensor, whatever files it lies in and however it is spread; and how plain
or sharded tensors and their optimizer take it up.

Keys are `model.<name>` for parameters and persistent buffers and `optimizer.<name>.<entry>` for what the optimizer
keeps of a parameter: its moments, in the parameter's shape, and its counts, numbers.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from matmix.train.optim.base import Optimizer

MODEL, OPTIMIZER = "model.", "optimizer."


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What a state says of one tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class FullState(abc.ABC):
    """Full tensors by key. Reads only what is asked for; needs neither ranks nor a model."""

    entries: Mapping[str, Entry]

    @abc.abstractmethod
    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, on the CPU, in memory of their own."""

    def read_whole(self, key: str) -> torch.Tensor:
        """The tensor in its shape."""
        return self.read(key).view(self.entries[key].shape)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor of the parameters and persistent buffers, one at a time."""
        for key in self.entries:
            if key.startswith(MODEL):
                yield key.removeprefix(MODEL), self.read_whole(key)

    def moments(self) -> dict[str, list[str]]:
        """Name of each parameter that has been updated -> the entries that the optimizer keeps of it."""
        found: dict[str, list[str]] = {}
        for key in self.entries:
            if key.startswith(OPTIMIZER):
                name, entry = key.removeprefix(OPTIMIZER).rsplit(".", 1)
                found.setdefault(name, []).append(entry)
        return found


def check_entries(shapes: Mapping[str, tuple[int, ...]], layout: Mapping[str, Any]) -> None:
    """Raises ValueError unless a state has exactly the tensors that a checkpoint's layout names, in their shapes.

    shapes: of the state, by key. layout: with "shapes" of the model's tensors, by name, and "moments", the entries
    that the optimizer keeps of each (missing in checkpoints of earlier versions: any).
    """
    wanted = {f"{MODEL}{name}": tuple(shape) for name, shape in layout["shapes"].items()}
    moments = layout.get("moments")
    if moments is not None:
        named = {f"{OPTIMIZER}{name}.{entry}" for name, entries in moments.items() for entry in entries}
    else:
        named = {key for key in shapes.keys() - wanted if _parameter(key) in wanted}
    if missing := (wanted.keys() | named) - shapes.keys():
        raise ValueError(f"{min(missing)} is missing")
    if extra := shapes.keys() - wanted - named:
        raise ValueError(f"it holds {min(extra, key=str)!a}, which the checkpoint does not name")
    for key, shape in shapes.items():
        # What the optimizer keeps is either shaped like its parameter or a number.
        allowed = (wanted[key],) if key in wanted else ((), wanted.get(_parameter(key)))
        if shape not in allowed:
            raise ValueError(f"{key} has the shape {shape}")


def _parameter(key: object) -> str:
    """The key of the parameter that an entry of the optimizer belongs to."""
    return MODEL + str(key).removeprefix(OPTIMIZER).rpartition(".")[0]


@torch.no_grad()
def fill(tensor: torch.Tensor, state: FullState, key: str) -> None:
    """Copies the tensor `key` of `state` into a plain tensor or this rank's part of a DTensor."""
    start = 0
    if isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        assert not any(offset[1:]), "fully_shard splits the first dimension"
        start = offset[0] * math.prod(tensor.shape[1:])
        tensor = tensor.to_local()
    if tensor.numel():
        tensor.copy_(state.read(key, start, start + tensor.numel()).view(tensor.shape))


def load_weights(tensors: Iterable[tuple[str, torch.Tensor]], state: FullState) -> None:
    """Fills parameters and buffers, given with their names, in place."""
    for name, tensor in tensors:
        fill(tensor.detach(), state, MODEL + name)


def kept_entries(state: FullState, optimizer: Optimizer) -> dict[str, list[str]]:
    """`state.moments()`, which `optimizer` can take up. Raises ValueError (one line) if it is another optimizer's."""
    held = state.moments()
    known = {*optimizer.moments, *optimizer.counts}
    for name, entries in held.items():
        if known != set(entries):
            raise ValueError(
                f"the checkpoint is of another optimizer: it keeps {', '.join(sorted(entries))} of {name}, "
                f"and {type(optimizer).__name__} keeps {', '.join(sorted(known)) or 'nothing'}; set optimizer.name as "
                "it was"
            )
    return held


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
