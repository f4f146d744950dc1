"""Finds out which rank has stopped when no rank makes progress, and is not one that only waits for it."""

import json
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist

from matmix.train.process.distributed import is_distributed
from matmix.train.process.launched import as_ranges


class Whereabouts(NamedTuple):
    """Where a rank stands."""

    begun: int  # collectives, since its start
    told: str  # what it says of itself


def exchange(places: dict[int, Whereabouts], attempt: str, rank: int, world_size: int, patience: float) -> None:
    """Tells the other ranks where this one stands, `places[rank]`, and adds those that tell the same within `patience`
    seconds. For a thread that may hang or fail: the store's host may be the one that does not answer."""
    if not is_distributed():
        return
    store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + patience
    key, others = f"matmix/whereabouts/{attempt}/", set(range(world_size)) - {rank}
    store.set(f"{key}{rank}", json.dumps(places[rank]))
    while time.monotonic() < deadline and (missing := others - places.keys()):
        for other in missing:
            if store.check([f"{key}{other}"]):
                places[other] = Whereabouts(*json.loads(store.get(f"{key}{other}")))
        time.sleep(min(0.1, patience / 20))
    # The process that hosts the store must not end before the others have asked.
    store.set(f"{key}{rank}/heard", "")
    while time.monotonic() < deadline and not all(store.check([f"{key}{other}/heard"]) for other in others):
        time.sleep(min(0.1, patience / 20))


def explain(places: Mapping[int, Whereabouts], rank: int, world_size: int) -> str:
    """Writes the line that tells of a hang; places: what `exchange` found on `rank`."""
    stopped = find_stopped(places, world_size)
    if not stopped or len(stopped) == world_size:
        return places[rank].told + ("; so did all other ranks, at the same place" if world_size > 1 else "")
    others = as_ranges(set(range(world_size)) - set(stopped))
    waiting = f"; ranks {others} wait for it" if world_size > 2 else f"; rank {others} waits for it"
    told = [where.told for other, where in places.items() if other in stopped]
    if told:
        return "; ".join(told) + (waiting if len(told) == 1 else "")
    return f"rank {as_ranges(stopped)} stopped and does not answer any more{waiting} ({places[rank].told})"


def find_stopped(places: Mapping[int, Whereabouts], world_size: int) -> list[int]:
    """Returns the ranks that have begun fewer collectives, else those that did not tell; [] where nobody can say."""
    most = max(where.begun for where in places.values())
    behind = [rank for rank, where in places.items() if where.begun < most]
    return sorted(behind) or sorted(set(range(world_size)) - places.keys())
