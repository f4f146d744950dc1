"""Finds out which rank has stopped when no rank makes progress: the ranks tell each other through the store where they
are, so that the message names the rank that stopped and not one that waits for it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping

import torch.distributed as dist

from matmix.train.process.distributed import is_distributed
from matmix.train.process.launched import as_ranges


@dataclasses.dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank stands."""

    begun: int  # collectives, since its start
    inside: str  # the collective that it is in, or ""
    told: str  # what it says of itself


def exchange(found: dict[int, Whereabouts], attempt: str, rank: int, world_size: int, patience: float) -> None:
    """Tells the other ranks where this one stands, `found[rank]`, and adds those that tell the same within `patience`
    seconds. To be called in a thread that may hang or fail: the store's host may be the one that does not answer."""
    if not is_distributed():
        return
    store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + patience
    key, others = f"matmix/whereabouts/{attempt}/", set(range(world_size)) - {rank}
    store.set(f"{key}{rank}", json.dumps(dataclasses.asdict(found[rank])))
    while time.monotonic() < deadline and (missing := others - found.keys()):
        for other in missing:
            if store.check([f"{key}{other}"]):
                found[other] = Whereabouts(**json.loads(store.get(f"{key}{other}")))
        time.sleep(min(0.1, patience / 20))
    # The process that hosts the store must not end before the others have asked.
    store.set(f"{key}{rank}/heard", "")
    while time.monotonic() < deadline and not all(store.check([f"{key}{other}/heard"]) for other in others):
        time.sleep(min(0.1, patience / 20))


def explain(found: Mapping[int, Whereabouts], rank: int, world_size: int) -> str:
    """The line that tells of a hang; found: what `exchange` found on `rank`."""
    stopped = find_stopped(found, world_size)
    waiting = f"; rank{'s' if world_size > 2 else ''} {as_ranges(set(range(world_size)) - set(stopped))} "
    waiting += f"wait{'' if world_size > 2 else 's'} for it"
    if not stopped or len(stopped) == world_size:
        return found[rank].told + ("; so did all other ranks, at the same place" if world_size > 1 else "")
    told = [where.told for other, where in found.items() if other in stopped]
    if told:
        return "; ".join(told) + (waiting if len(told) == 1 else "")
    return f"rank {as_ranges(stopped)} stopped and does not answer any more{waiting} ({found[rank].told})"


def find_stopped(found: Mapping[int, Whereabouts], world_size: int) -> list[int]:
    """The ranks that the others wait for: those that have begun fewer collectives, else those that did not tell; []
    where that cannot be said."""
    counts = [where.begun for where in found.values()]
    behind = [rank for rank, where in found.items() if where.begun < max(counts)]
    missing = sorted(set(range(world_size)) - found.keys())
    return sorted(behind) or missing
