"""The states that the lanes of a run carry from step to step (`data.carry`), and their files in checkpoints:

    STEP/carried/rank-00000.safetensors, rank-00001 ...    of the lanes of each rank with data of its own, in order

Lane j is row j of every global batch, so that the lanes of a rank are what it is given of one, and another number of
ranks or micro-batches takes up the same states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch.utils._pytree import tree_leaves, tree_map_only

from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.data.storage.files import open_durable
from matmix.model.carrying import CarriedRows, widened
from matmix.train.engine.full_tensors import TensorFiles

SUBDIRECTORY = "carried"


class Lanes:
    """The states of this rank's lanes, those of each micro-batch of a step by themselves; none where nothing is
    carried."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.rows = [CarriedRows() for _ in range(loader.micro_batches_per_step)]
        self.samples = 0  # number of the sample that follows those that the states are behind

    @property
    def size(self) -> int:
        """The number of this rank's lanes."""
        return self.loader.global_batch_size // self.loader.data_size

    def begin_step(self) -> None:
        """Called before the batches of a step are read. States of other rows than those before, as data was left out,
        are forgotten."""
        if self.loader.samples != self.samples:
            self.forget()
        self.samples = self.loader.samples + self.loader.global_batch_size

    def forget(self) -> None:
        """Lets all lanes go on as if documents began there."""
        for rows in self.rows:
            rows.states = None

    def attach(self, number: int, batch: Batch) -> Batch:
        """Gives a micro-batch, the `number`-th that was read, the states that its rows go on with; returns it."""
        if batch.continues is not None:
            batch.carried = self.rows[number % len(self.rows)]
        return batch

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the states, (lanes of this rank, ...) on the CPU, by layer and place; {} where there are none."""
        parts = [dict(_named(rows.states or ())) for rows in self.rows]
        return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}

    def load(self, checkpoint: Path, files: Iterable[str], fresh: Sequence[Any]) -> None:
        """Takes up the states of a checkpoint of these `files`, and the position that the loader has loaded. fresh: the
        states of this rank's lanes before any token, by layer. Raises ValueError (one line) for damaged files."""
        self.forget()
        self.samples = self.loader.samples
        fresh = tree_map_only(torch.Tensor, widened, list(fresh))
        paths = sorted(checkpoint / name for name in files if name.startswith(f"{SUBDIRECTORY}/"))
        if not paths:  # such as after a step that was left out
            return
        damaged = f"checkpoint {checkpoint} is damaged"
        parts, share = [TensorFiles([path], damaged) for path in paths], self.loader.global_batch_size // len(paths)
        states = {name: ((share, *state.shape[1:]), state.dtype) for name, state in _named(fresh)}
        for path, part in zip(paths, parts, strict=True):
            if {name: (entry.shape, entry.dtype) for name, entry in part.entries.items()} != states:
                raise ValueError(f"{damaged}: {SUBDIRECTORY}/{path.name} does not hold the states of {share} lanes")
        lanes = [divmod(self.loader.data_rank * self.size + lane, share) for lane in range(self.size)]
        for name, state in _named(fresh):
            row = state[0].numel()
            read = [parts[part].read(name, place * row, (place + 1) * row) for part, place in lanes]
            state.copy_(torch.cat(read).view_as(state))
        for number, rows in enumerate(self.rows):
            first = number * self.loader.micro_batch_size
            last = first + self.loader.micro_batch_size
            rows.states = tree_map_only(torch.Tensor, lambda state: state[first:last], fresh)  # noqa: B023


def write_lanes(tensors: dict[str, torch.Tensor], directory: Path, data_rank: int) -> None:
    """Writes a rank's `Lanes.tensors` into the folder of a checkpoint. Raises OSError where the storage failed."""
    (directory / SUBDIRECTORY).mkdir(exist_ok=True)
    with open_durable(directory / SUBDIRECTORY / f"rank-{data_rank:05d}.safetensors") as file:
        file.write(save(tensors))


def _named(states: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the layers' states, each as "<layer>.<place>"."""
    for layer, state in enumerate(states):
        for place, tensor in enumerate(tree_leaves(state)):
            if tensor is not None:
                yield f"{layer}.{place}", tensor
