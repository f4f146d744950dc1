"""Which rank the others wait for. At every record the ranks exchange three numbers each; a rank that keeps the others
waiting for several records in a row is named once, until it has kept up again.

Ranks step together, so a step takes the same time on all of them: what one of them does not spend waiting in
collectives it spends on its own, computing or waiting for its data, and only that is compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from matmix.train.engine.base import Engine

FACTOR, SHARE = 1.5, 0.2
"""A rank is slow whose own time is so many times that of the median rank, and exceeds it by this share of a step."""
RECORDS = 3
"""Number of records in a row after which a rank is named, or is said to keep up again."""

Times = tuple[float, float, float]
"""Seconds per step of one rank: the whole step, waiting for data, collectives."""


class Stragglers:
    """Counts for how many records each rank was slow; the same on all ranks."""

    def __init__(self, engine: Engine, workers: int) -> None:
        self.engine, self.workers = engine, workers
        self.named: set[int] = set()
        self.streaks: dict[int, int] = {}

    def look(self, step: int, own: Times) -> tuple[dict[str, float], list[str]]:
        """(numbers of a record, lines to tell) from this rank's times since the last record. On all ranks; nothing in
        a single process."""
        if self.engine.world_size == 1:
            return {}, []
        mine = torch.tensor(own, dtype=torch.float64, device=self.engine.device)
        times = [tuple(row) for row in self.engine.all_gather(mine).tolist()]
        return numbers(times), self.judge(step, times)

    def judge(self, step: int, times: Sequence[Times]) -> list[str]:
        """A line for each rank that has now been slow long enough, and for each that keeps up again."""
        alone, lines = own_times(times), []
        usual = statistics.median_low(alone)
        whole = max(seconds for seconds, _, _ in times)
        for rank, seconds in enumerate(alone):
            slow = seconds > FACTOR * usual and seconds - usual > SHARE * whole
            changed = slow != (rank in self.named)
            self.streaks[rank] = self.streaks.get(rank, 0) + 1 if changed else 0
            if self.streaks[rank] < RECORDS:
                continue
            self.streaks[rank] = 0
            self.named ^= {rank}
            lines.append(self._line(step, rank, times, usual) if slow else f"step {step}: rank {rank} keeps up again")
        return lines

    def _line(self, step: int, rank: int, times: Sequence[Times], usual: float) -> str:
        alone, waits = own_times(times)[rank], times[rank][1]
        common = statistics.median_low(wait for _, wait, _ in times)
        if waits - common > (alone - usual) / 2:
            return (
                f"step {step}: the other ranks wait for rank {rank}, which waits {waits * 1e3:.3g} ms a step for its "
                f"data (the median rank {common * 1e3:.3g} ms): look at the disk or network of its node, or raise "
                f"data.workers (now {self.workers})"
            )
        return (
            f"step {step}: the other ranks wait for rank {rank}, which needs {(alone - waits) * 1e3:.3g} ms a step for "
            f"its own work (the median rank {max(usual - common, 0) * 1e3:.3g} ms): look at its node and device"
        )


def own_times(times: Sequence[Times]) -> list[float]:
    """Seconds per step that each rank did not spend in collectives."""
    # Exchanges may run beside the computation, so that both together are more than the step.
    return [max(step - collectives, data) for step, data, collectives in times]


def numbers(times: Sequence[Times]) -> dict[str, float]:
    """For a record: seconds a step; "slowest" is the rank that spent most on its own."""
    alone = own_times(times)
    _, data, collectives = zip(*times, strict=True)
    return {
        "slowest": float(alone.index(max(alone))),
        "own_max": max(alone),
        "own_median": statistics.median(alone),
        "data_wait_max": max(data),
        "collectives_max": max(collectives),
        "collectives_min": min(collectives),
    }
