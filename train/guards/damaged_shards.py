"""Sequences that are left out for a damaged shard (`data.skip_damaged`): counted, and each shard told once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from matmix.data.loading.batch import Batch
from matmix.train.process.distributed import gather_objects

logger = logging.getLogger(__name__)


class DamagedShards:
    """Collects the damaged shards that the micro-batches of all ranks report."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._new: dict[str, str] = {}

    def count(self, micro_batches: Sequence[Batch]) -> tuple[int, int]:
        """Of this rank's micro-batches: rows without data, and shards that nobody has been told of. The sums over all
        ranks are what the run counts, and what `share` needs."""
        self._new = {
            where: why
            for batch in micro_batches
            for where, why in batch.damaged.items()
            if where not in self._told
        }  # fmt: skip
        return sum(batch.n_damaged for batch in micro_batches), len(self._new)

    def share(self) -> None:
        """On all ranks, if any of them has something new: each shard is told once, whichever rank met it."""
        found = {where: why for rank in gather_objects(self._new) for where, why in rank.items()}
        for where in sorted(found.keys() - self._told):
            logger.warning(f"leaving out the sequences of a damaged shard: {found[where]}")
        self._told |= found.keys()
