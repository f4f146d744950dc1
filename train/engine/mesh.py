"""The mesh: the ranks of a run as a grid with named dimensions, numbered along the last one first. It says who is given
which data, who holds which part of the model, and who sums what with whom.

    replicate   copies of the model; each is given data of its own
    shard       the ranks that share one copy; each is given data of its own
    context     the ranks that share the rows of a micro-batch; each is given a part of their tokens. With copies on all
                ranks (ddp) each has one, else a part of the model, too

A dimension more is a line in `dimensions_of` and what the engine does along it; no other file counts ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from matmix.data.loading.rows import Part
from matmix.train.engine.config import EngineConfig
from matmix.train.optim.base import is_sharded
from matmix.train.process.distributed import Distributed


@dataclasses.dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of the mesh, and what tells the ranks along it apart."""

    name: str
    size: int
    batches: Literal["own", "part", "same"] = "own"
    """The ranks along it compute batches of their own, each a part of one batch, or all the same batch."""
    shards: bool = False
    """They hold different parts of the weights and of what the optimizer keeps, and not copies."""


def dimensions_of(config: EngineConfig, ranks: int) -> tuple[Dimension, ...]:
    """Returns the dimensions of the mesh of so many ranks, outermost first: those whose ranks talk most are on one
    node. Raises ValueError (one line) where the ranks cannot be laid out so."""
    context, sharded = config.context, config.name == "fsdp2"
    if ranks % context:
        problem = f"engine.context = {context} does not divide the {ranks} ranks of this run"
        raise ValueError(f"{problem}; use a divisor of {ranks}")
    groups = ranks // context
    copies = config.replicate if sharded else groups  # DeepSpeed cuts copies by itself
    if groups % copies:
        each = f" / engine.context = {groups}" if context > 1 else ""
        problem = f"engine.replicate = {copies} does not divide the {ranks} ranks of this run{each}"
        raise ValueError(f"{problem}; use a divisor of {groups}")
    return (
        Dimension("replicate", copies),
        Dimension("shard", groups // copies, shards=True),
        Dimension("context", context, "part", shards=sharded),
    )


class MeshShape:
    """The arithmetic of a mesh: needs no process group, so that plans and launchers ask it, too."""

    def __init__(self, dimensions: Iterable[Dimension] = ()) -> None:
        self.dimensions = tuple(dimensions)

    @classmethod
    def of(cls, config: EngineConfig, ranks: int) -> MeshShape:
        """Returns the shape of a run on so many ranks. Raises ValueError as `dimensions_of` does."""
        return cls(dimensions_of(config, ranks))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return _size(self.dimensions)

    @property
    def data_size(self) -> int:
        """The number of ranks that are given data of their own, by which a global batch is divided."""
        return _size(filter(_has_data, self.dimensions))

    @property
    def parts(self) -> int:
        """The number of ranks that share one copy of the model."""
        return _size(one for one in self.dimensions if one.shards)

    @property
    def copies(self) -> int:
        """The number of copies of each part of the model."""
        return self.size // self.parts

    def data_rank_of(self, rank: int) -> int:
        """Returns which of the `data_size` pieces of a global batch a rank is given."""
        return self._index(rank, _has_data)

    def part_of(self, rank: int) -> int:
        """Returns which of the `parts` of the model a rank holds: ranks with the same number hold copies of it."""
        return self._index(rank, lambda one: one.shards)

    def _index(self, rank: int, belongs: Callable[[Dimension], bool]) -> int:
        """Returns the place of a rank along the dimensions that belong, as one number."""
        index, stride = 0, 1
        for dimension in reversed(self.dimensions):
            rank, place = divmod(rank, dimension.size)
            if belongs(dimension):
                index += stride * place
                stride *= dimension.size
        return index


class Mesh(MeshShape):
    """The mesh as one rank sees it, with the groups of ranks that sum and exchange. Made on all ranks together."""

    def __init__(self, dimensions: Iterable[Dimension] = (), rank: int = 0, device: torch.device | None = None) -> None:
        super().__init__(dimensions)
        self.rank, self.device = rank, device or torch.device("cpu")
        self.data_rank = self.data_rank_of(rank)
        self.batch_rank = self._index(rank, lambda dimension: dimension.batches != "same")
        """Which of the different batches, or parts of one, this rank computes, and so which random numbers it draws."""
        contexts = [dimension.size for dimension in self.dimensions if dimension.name == "context"]
        self.part = Part(self.place("context"), math.prod(contexts))
        """Which part of the rows of a micro-batch this rank is given."""
        self.is_counted = self._index(rank, lambda dimension: dimension.batches == "same") == 0
        """False if another rank computes the same batch and counts in sums over all ranks."""
        self.data_group: dist.ProcessGroup | None = None
        """The ranks along the dimensions with data of their own, in the order of `data_rank`; None = all ranks."""
        self._groups: DeviceMesh | None = None
        if self.data_size < self.size:
            others = [dimension for dimension in self.dimensions if not _has_data(dimension)]
            axes = {dimension.name: [dimension] for dimension in others}
            self._groups = self._device_mesh({"data": list(filter(_has_data, self.dimensions)), **axes})
            self.data_group = self._groups.get_group("data")

    def group(self, name: str) -> dist.ProcessGroup:
        """Returns the ranks along one dimension whose ranks are given the same data, for what the engine does there."""
        assert self._groups is not None, f"no rank shares its data with another along {name}"
        return self._groups.get_group(name)

    def place(self, name: str) -> int:
        """Returns this rank's place along one dimension."""
        return self._index(self.rank, lambda dimension: dimension.name == name)

    @functools.cached_property
    def spread(self) -> DeviceMesh | None:
        """The mesh of weights, gradients and the optimizer's entries, None in a single process: along "parts" they are
        cut and their norms add up, along "copies" they are the same; gradients are summed over both. Dimensions along
        which batches are the same follow by their own names. First asked for on all ranks together."""
        if self.size == 1:
            return None
        same = [dimension for dimension in self.dimensions if dimension.batches == "same"]
        summed = [dimension for dimension in self.dimensions if dimension not in same]
        copies = [dimension for dimension in summed if not dimension.shards]
        parts = [dimension for dimension in summed if dimension.shards]
        return self._device_mesh({"copies": copies, "parts": parts, **{one.name: [one] for one in same}})

    def written_here(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns what this rank writes of a state that all ranks hold under the same keys: of the sharded tensors each
        copy of the model writes its share, whole and by number of elements, and all others are the first rank's."""
        if self.size == 1:
            return dict(state)
        copy, written, own = self._index(self.rank, lambda one: not one.shards), [0] * self.copies, {}
        for key, tensor in state.items():
            if is_sharded(tensor):
                writer = written.index(min(written))
                written[writer] += tensor.numel()
                if writer == copy:
                    own[key] = tensor
            elif self.rank == 0:
                own[key] = tensor
        return own

    def _device_mesh(self, axes: Mapping[str, Sequence[Dimension]]) -> DeviceMesh:
        """Returns all ranks as a mesh of these axes, each made of some of the dimensions."""
        ranks = torch.arange(self.size).view([dimension.size for dimension in self.dimensions])
        order = [self.dimensions.index(dimension) for axis in axes.values() for dimension in axis]
        ranks = ranks.permute(order).reshape([_size(axis) for axis in axes.values()])
        return DeviceMesh(self.device.type, ranks, mesh_dim_names=tuple(axes))


def make_mesh(config: EngineConfig, distributed: Distributed) -> Mesh:
    """Lays out the ranks of a run, on all of them together. Raises ValueError (one line) if they do not fit."""
    return Mesh(dimensions_of(config, distributed.world_size), distributed.rank, distributed.device)


def _size(dimensions: Iterable[Dimension]) -> int:
    return math.prod(dimension.size for dimension in dimensions)


def _has_data(dimension: Dimension) -> bool:
    return dimension.batches == "own"
