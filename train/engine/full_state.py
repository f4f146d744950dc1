"""A whole training state as full tensors, independent of the files it lies in and of how it is sharded. Keys are
`model.<name>` for parameters and persistent buffers, `optimizer.<name>.<entry>` for what the optimizer keeps."""

import abc
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from matmix.train.optim.averaging import AVERAGE, ENTRIES
from matmix.train.optim.base import Optimizer, local_part, region

MODEL, OPTIMIZER = "model.", "optimizer."
Moments = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Name of a parameter -> the shapes of what the optimizer keeps of it, by the names of the entries."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """Shape and dtype of a tensor that was not read."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class FullState(abc.ABC):
    """Full tensors by key. Reads only what is asked for; needs neither ranks nor a model. A subclass has `read`, or
    `_read_rows` where it reads rows of tensors."""

    entries: Mapping[str, Entry]

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Returns elements [start, stop) of the flattened tensor, on the CPU, in memory of their own."""
        entry = self.entries[key]
        stop = entry.numel if stop is None else stop
        row = max(1, math.prod(entry.shape[1:]))
        first = start // row
        rows = self._read_rows(key, first, -(-stop // row)).flatten()
        return rows[start - first * row : stop - first * row]

    def _read_rows(self, key: str, first: int, last: int) -> torch.Tensor:
        """Returns rows [first, last) of the tensor, or all of a tensor without dimensions."""
        raise NotImplementedError

    def read_whole(self, key: str) -> torch.Tensor:
        """Returns the tensor in its shape."""
        return self.read(key).view(self.entries[key].shape)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and full tensor of the parameters and persistent buffers, one at a time."""
        for key in self.entries:
            if key.startswith(MODEL):
                yield key.removeprefix(MODEL), self.read_whole(key)

    def moments(self) -> Moments:
        """Returns what the optimizer keeps of each parameter that has been updated."""
        kept: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, one in self.entries.items():
            if key.startswith(OPTIMIZER):
                name, entry = key.removeprefix(OPTIMIZER).rsplit(".", 1)
                kept.setdefault(name, {})[entry] = one.shape
        return kept


class RenamedState(FullState):
    """Some of the tensors of a state, under other keys."""

    def __init__(self, state: FullState, keys: Mapping[str, str]) -> None:
        """keys: those of this state -> those of `state`."""
        self._state, self._keys = state, keys
        self.entries = {key: state.entries[source] for key, source in keys.items()}

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._state.read(self._keys[key], start, stop)


def averaged(state: FullState, where: str) -> FullState:
    """Returns a state with the averages in the place of the weights that have one, the buffers, and nothing of the
    optimizer. Raises ValueError (one line) where there are no averages; where: whose state it is."""
    weights = [key for key in state.entries if key.startswith(MODEL)]
    averages = {key: f"{OPTIMIZER}{key.removeprefix(MODEL)}.{AVERAGE}" for key in weights}
    if not any(average in state.entries for average in averages.values()):
        raise ValueError(f"{where} holds no average of the weights, which ema.decay keeps: take the raw weights")
    return RenamedState(state, {key: one if one in state.entries else key for key, one in averages.items()})


class CheckpointFiles(FullState):
    """The files of a checkpoint of one kind, read without ranks, and without the engine that wrote them."""

    engine_names: ClassVar[str] = ""
    """The values of engine.name that write and read this kind, for messages."""

    @abc.abstractmethod
    def __init__(self, checkpoint: Path, layout: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """layout: as the manifest has it; weights_only: only what the `weight_files` hold will be read. Raises
        ValueError if the files do not hold the layout's tensors."""

    @staticmethod
    def shards(files: Iterable[str]) -> set[str]:
        """Returns those `files` of which a rank reads only what `files_for` names; the others say what lies in them."""
        return set()

    def files_for(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        return set()

    @staticmethod
    @abc.abstractmethod
    def weight_files(layout: Mapping[str, Any], files: Iterable[str]) -> list[str]:
        """Returns those of a checkpoint's `files` that must be read for its weights."""


def layout_of_moments(moments: Moments, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Returns what a layout says of the optimizer's entries: "moments" names them, and "moment_shapes" has the shapes
    of those that are neither shaped like their parameter nor numbers. shapes: of the parameters, by name."""
    other = {
        f"{name}.{entry}": list(shape)
        for name, entries in moments.items()
        for entry, shape in entries.items()
        if shape and tuple(shape) != tuple(shapes[name])
    }
    named = {"moments": {name: list(entries) for name, entries in moments.items()}}
    return {**named, "moment_shapes": other} if other else named


def check_entries(shapes: Mapping[str, tuple[int, ...]], layout: Mapping[str, Any]) -> None:
    """Raises ValueError unless a state has exactly the tensors that a checkpoint's layout names, in their shapes.
    shapes: of the state, by key. layout: with "shapes" of the model's tensors, by name, and `layout_of_moments`."""
    allowed = {f"{MODEL}{name}": (tuple(shape),) for name, shape in layout["shapes"].items()}
    if "moments" not in layout:
        raise ValueError("the checkpoint does not say what the optimizer keeps")
    other = layout.get("moment_shapes", {})
    for name, entries in layout["moments"].items():
        for entry in entries:
            own, key = other.get(f"{name}.{entry}"), f"{OPTIMIZER}{name}.{entry}"
            allowed[key] = ((), *allowed.get(f"{MODEL}{name}", ())) if own is None else (tuple(own),)
    if missing := allowed.keys() - shapes.keys():
        raise ValueError(f"{min(missing)} is missing")
    if extra := shapes.keys() - allowed.keys():
        raise ValueError(f"it holds {min(extra, key=str)!a}, which the checkpoint does not name")
    for key, shape in shapes.items():
        if shape not in allowed[key]:
            raise ValueError(f"{key} has the shape {shape}")


# -- into tensors and optimizers ---------------------------------------------------------------------------------


@torch.no_grad()
def fill(tensor: torch.Tensor, state: FullState, key: str) -> None:
    """Copies the tensor `key` of `state` into a plain tensor or this rank's part of a DTensor, along whichever
    dimensions that is cut; if that of the state has fewer rows, into the first rows of the whole."""
    (shape, offset), tensor, whole = region(tensor), local_part(tensor), tensor.shape
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


def kept_entries(
    state: FullState, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, list[str]]:
    """Returns what of `state.moments()` `optimizer` takes up; an average of the weights may be missing, and is left
    where none is kept. parameters: the model's. Raises ValueError (one line) where it is another optimizer's."""
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
    """Replaces all that an optimizer keeps by new tensors, as many as `state` has, and returns these by the keys of
    `state` that they are to be filled from. parameters: the model's, by name, sharded (DTensor) or not. Raises as
    `kept_entries` does, before anything changes."""
    held = kept_entries(state, optimizer, parameters)
    optimizer.state.clear()
    wanted = {}
    for name, parameter, group in optimizer.named_parameters():
        if entries := held.get(name):
            new = optimizer.whole_state(parameter.detach(), group)
            optimizer.state[parameter] = {entry: new[entry] for entry in entries}
            wanted |= {f"{OPTIMIZER}{name}.{entry}": new[entry] for entry in entries}
    return wanted
