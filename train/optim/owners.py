"""Linear maps of which ranks hold rows, each computed as a whole by one of them, its owner."""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from matmix.train.optim.base import is_sharded

BATCH = 1 << 26
"""Elements of the maps that are on their way at a time: 256 MiB of float32."""


class LinearMap(NamedTuple):
    """Some rows of a parameter."""

    place: int
    """Which of the parameters."""
    first: int
    last: int
    """The row behind its last one."""
    columns: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.last - self.first, self.columns))

    @property
    def cost(self) -> int:
        """Half of the FLOPs of a Newton-Schulz iteration."""
        short, long = sorted(self.shape)
        return short**2 * (2 * long + short)

    def within(self, start: int, stop: int) -> slice:
        """Returns which of its own rows are among the rows from `start` to `stop` of the parameter."""
        first = min(max(start, self.first), self.last) - self.first
        return slice(first, max(min(stop, self.last) - self.first, first))


class Ranks(NamedTuple):
    """The ranks over which a parameter is spread: each copy of it is cut into as many parts."""

    group: dist.ProcessGroup
    places: list[tuple[int, int]]
    """The copy and the part of it that each rank of the group holds."""
    own: int
    """This rank's place in the group."""
    parts: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Ranks | None:
        """Returns None for a parameter that this rank holds as a whole and for itself."""
        if not is_sharded(parameter) or parameter.device_mesh.size() == 1:
            return None
        mesh = parameter.device_mesh
        assert parameter.placements[-1].is_shard(0)
        assert all(one.is_replicate() for one in parameter.placements[:-1])
        group = (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
        parts = mesh.size(mesh.ndim - 1)
        places = {rank: divmod(index, parts) for index, rank in enumerate(mesh.mesh.flatten().tolist())}
        return cls(group, [places[rank] for rank in dist.get_process_group_ranks(group)], dist.get_rank(group), parts)

    def rows(self, part: int, rows: int) -> tuple[int, int]:
        """Returns the first of the rows that a part of a parameter of so many has, and the one behind its last: each
        has as many, the last ones fewer or none."""
        each = -(-rows // self.parts)
        return min(part * each, rows), min((part + 1) * each, rows)


def on_owners(
    parameters: Sequence[torch.Tensor],
    held: Sequence[torch.Tensor],
    blocks: Sequence[tuple[int, ...]],
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[tuple[LinearMap, slice, torch.Tensor]]:
    """Computes something of linear maps, each on one rank, and yields, for each map of which this rank has rows, the
    map, which rows of this rank's part of the parameter are among its own, and these rows of the result.

    parameters: sharded (DTensor) or not, all in one way; on all ranks in one order. held: something in the shape of
    this rank's part of each, in one dtype. blocks: the rows of the maps that stand one below the other in each.
    compute: makes a result of the shape (rows, columns) of a map. A map goes to its owner from the ranks of one copy of
    the parameter, and its result to the ranks of all copies: two all-to-alls for a batch of maps.
    """
    maps = maps_of([one.shape[1] for one in held], blocks)
    ranks = Ranks.of(parameters[0]) if parameters else None
    if ranks is None:
        for one in maps:
            rows = slice(one.first, one.last)
            yield one, rows, compute(held[one.place][rows])
        return
    maps.sort(key=lambda one: -one.cost)
    owned = list(zip(maps, owners_of(maps, len(ranks.places)), strict=True))
    for batch in _batches(owned, len(ranks.places)):
        yield from _exchanged(batch, ranks, [len(parameter) for parameter in parameters], held, compute)


def maps_of(columns: Iterable[int], blocks: Iterable[Sequence[int]]) -> list[LinearMap]:
    """Returns the maps in parameters of which the columns are given, and the rows of the maps that stand one below the
    other."""
    return [
        LinearMap(place, last - rows, last, width)
        for place, (width, own) in enumerate(zip(columns, blocks, strict=True))
        for rows, last in zip(own, itertools.accumulate(own), strict=True)
    ]


def work_of(maps: Sequence[LinearMap], copies: int, parts: int) -> tuple[int, float]:
    """Returns the cost of all maps of the rank with the most to do, and the elements of its buffers in `on_owners` when
    most are in use, with Newton-Schulz iterations as what is computed there."""
    if not maps:
        return 0, 0
    maps, ranks = sorted(maps, key=lambda one: -one.cost), copies * parts
    owned = list(zip(maps, owners_of(maps, ranks), strict=True))
    costs: collections.Counter[int] = collections.Counter()
    for one, owner in owned:
        costs[owner] += one.cost
    # Iterations have two matrices in the shape of the map and two of its shorter side.
    iterating = max(2 * one.shape.numel() + 2 * min(one.shape) ** 2 for one in maps)
    if ranks == 1:
        return costs[0], iterating
    most = 0.0
    for batch in _batches(owned, ranks):
        elements: collections.Counter[int] = collections.Counter()
        for one, owner in batch:
            elements[owner] += one.shape.numel()
        # What came, the results, and what goes out to all copies while this rank's rows of all results come; or, of
        # the last map, its rows as one while the iterations run.
        own, rows = max(elements.values()), elements.total() / parts
        most = max(most, 2 * own + max(copies * own + rows, iterating))
    return max(costs.values()), most


def owners_of(maps: Sequence[LinearMap], count: int) -> list[int]:
    """Returns the owner of each map, the dearest first: the rank that has least to do so far."""
    busy, owners = [(0, rank) for rank in range(count)], []
    for one in maps:
        cost, rank = busy[0]
        heapq.heapreplace(busy, (cost + one.cost, rank))
        owners.append(rank)
    return owners


def _batches(owned: Sequence[tuple[LinearMap, int]], ranks: int) -> Iterator[list[tuple[LinearMap, int]]]:
    """Yields maps of `BATCH` elements at a time, or at least one for each rank."""
    batch: list[tuple[LinearMap, int]] = []
    room = BATCH
    for one, owner in owned:
        room -= one.shape.numel()
        if room < 0 and len(batch) >= ranks:
            yield batch
            batch, room = [], BATCH - one.shape.numel()
        batch.append((one, owner))
    yield batch


def _exchanged(
    batch: Sequence[tuple[LinearMap, int]],
    ranks: Ranks,
    lengths: Sequence[int],
    held: Sequence[torch.Tensor],
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[tuple[LinearMap, slice, torch.Tensor]]:
    """Does what `on_owners` does for a few maps; lengths: the rows of the whole parameters."""
    copy, part = ranks.places[ranks.own]
    theirs: list[list[LinearMap]] = [[] for _ in ranks.places]
    for one, owner in batch:
        theirs[owner].append(one)
    mine = theirs[ranks.own]

    def own_rows(one: LinearMap, part: int) -> slice:
        return one.within(*ranks.rows(part, lengths[one.place]))

    def held_rows(one: LinearMap) -> slice:
        begins, rows = ranks.rows(part, lengths[one.place])[0], own_rows(one, part)
        return slice(one.first + rows.start - begins, one.first + rows.stop - begins)

    def shapes(maps: Sequence[LinearMap], part: int) -> list[tuple[int, int]]:
        return [(rows.stop - rows.start, one.columns) for one in maps for rows in (own_rows(one, part),)]

    like = held[0]
    given = [
        [held[one.place][held_rows(one)] for one in maps] if there == copy else []
        for (there, _), maps in zip(ranks.places, theirs, strict=True)
    ]
    taken = [shapes(mine, its) if there == copy else [] for there, its in ranks.places]
    pieces = _all_to_all(given, taken, like, ranks.group)
    in_order = [
        piece
        for (there, _), piece in sorted(zip(ranks.places, pieces, strict=True), key=lambda one: one[0])
        if there == copy
    ]
    results = [compute(torch.cat(rows)) for rows in zip(*in_order, strict=True)]

    given = [[result[own_rows(one, its)] for one, result in zip(mine, results, strict=True)] for _, its in ranks.places]
    returned = _all_to_all(given, [shapes(maps, part) for maps in theirs], like, ranks.group)
    for maps, rows in zip(theirs, returned, strict=True):
        for one, result in zip(maps, rows, strict=True):
            if len(result):
                yield one, held_rows(one), result


def _all_to_all(
    given: Sequence[Sequence[torch.Tensor]],
    shapes: Sequence[Sequence[tuple[int, int]]],
    like: torch.Tensor,
    group: dist.ProcessGroup,
) -> list[list[torch.Tensor]]:
    """Gives each rank its tensors, and returns what each gives, in these shapes, of the dtype of `like`."""
    sent = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for to_one in given for tensor in to_one)])
    sizes = [[rows * columns for rows, columns in from_one] for from_one in shapes]
    counts = [sum(from_one) for from_one in sizes]
    received = like.new_empty(sum(counts))
    to_each = [sum(tensor.numel() for tensor in to_one) for to_one in given]
    dist.all_to_all_single(received, sent, counts, to_each, group=group)
    return [
        [piece.view(shape) for piece, shape in zip(part.split(own), their, strict=True)] if own else []
        for part, own, their in zip(received.split(counts), sizes, shapes, strict=True)
    ]
