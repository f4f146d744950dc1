"""Counts and times the collectives of this process, and tells which rank the others wait for.

Ranks run the same program, so they begin the same collectives. Of ranks that stand still, the others wait for the one
that has begun the fewest. Of ranks that go on, a step takes the same time on all: what one does not spend waiting in
collectives it spends on its own work or waiting for its data, so the one that waits least is slow.

torch has no hook for this that engines share, so the functions of torch.distributed that they call are wrapped. On a
CPU the host waits in them, and its clock tells how long. On a GPU they return at once; events around them, in the
streams they run in, are read when the device has long passed them, and only of steps that `measure` is told of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from matmix.train.engine.base import Engine

FACTOR, SHARE = 1.5, 0.2
"""A rank is slow if its own time is this many times that of the median rank and exceeds it by this share of a step."""
RECORDS = 3
"""Number of records in a row after which a rank is named, or is said to keep up again."""

Times = tuple[float, float, float]
"""Seconds per step of one rank: the whole step, waiting for data, collectives."""

_FUNCTIONS = (
    *("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "broadcast_object_list"),
    *("all_gather_into_tensor", "reduce_scatter_tensor"),
)


@dataclasses.dataclass(slots=True)
class _Count:
    thread: int = 0  # that of the loop
    begun: int = 0
    inside: str = ""  # the collective that the host is in, if it is
    seconds: float = 0.0  # that the host spent in collectives
    timed: bool = False  # events of the device are recorded
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = dataclasses.field(default_factory=list)


_count = _Count()


def begun() -> int:
    """Returns the number of collectives that this process has begun."""
    return _count.begun


def inside() -> str:
    """Returns the name of the collective that the host is in, or ""."""
    return _count.inside


def watch() -> None:
    """Wraps the collectives of torch.distributed in this process, however often it is called. From then on those of the
    calling thread count, and those of autograd's threads that work for it."""
    _count.thread = threading.get_ident()
    for name in _FUNCTIONS:
        function = getattr(dist, name)
        if not hasattr(function, "_matmix_counted"):
            setattr(dist, name, _counted(name, function))


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*arguments: Any, **options: Any) -> Any:
        if _count.inside or not _is_of_loop():  # a part of another, or of a save in the background
            return function(*arguments, **options)
        _count.begun, _count.inside = _count.begun + 1, name
        events = None
        if _count.timed:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            _count.seconds += time.perf_counter() - began
            _count.inside = ""
            if events is not None:
                events[1].record()
                _count.events.append(events)

    counted._matmix_counted = True
    return counted


def _is_of_loop() -> bool:
    # Threads that Python has not started are autograd's.
    return threading.get_ident() == _count.thread or isinstance(threading.current_thread(), threading._DummyThread)


class CollectiveClock:
    """Measures the time that steps spend in collectives: waiting for other ranks, and exchanging with them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.steps, self.seconds = 0, 0.0
        _count.events.clear()

    @contextlib.contextmanager
    def measure(self, *, sample: bool) -> Iterator[None]:
        """Measures the step inside; on a GPU only where `sample` says so."""
        cuda = self.device.type == "cuda"
        if cuda and not sample:
            yield
            return
        _count.timed, began = cuda, _count.seconds
        try:
            yield
        finally:
            _count.timed = False
        self.steps += 1
        if not cuda:
            self.seconds += _count.seconds - began

    def per_step(self) -> float:
        """Returns the seconds per measured step since `reset`. It does not wait for the device: events that this has
        not passed are left out."""
        passed = [(first, last) for first, last in _count.events if last.query()]
        seconds = self.seconds + sum(first.elapsed_time(last) for first, last in passed) / 1e3
        return seconds / max(self.steps, 1)


class Stragglers:
    """Names each rank once that kept the others waiting for several records in a row, until it has kept up again. What
    it remembers is the same on all ranks."""

    def __init__(self, engine: Engine, workers: int) -> None:
        self.engine, self.workers = engine, workers
        self.named: set[int] = set()
        self.streaks: dict[int, int] = {}

    def look(self, step: int, own: Times) -> tuple[dict[str, float], list[str]]:
        """Returns (numbers of a record, lines to log) from this rank's times since the last record, both empty in a
        single process. Called on all ranks."""
        if self.engine.world_size == 1:
            return {}, []
        mine = torch.tensor(own, dtype=torch.float64, device=self.engine.device)
        times = [tuple(row) for row in self.engine.all_gather(mine).tolist()]
        return numbers(times), self.judge(step, times)

    def judge(self, step: int, times: Sequence[Times]) -> list[str]:
        """Returns a line for each rank that has now been slow long enough, and for each that keeps up again."""
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
    """Returns the seconds per step that each rank did not spend in collectives."""
    # Exchanges may run beside the computation, so that both together are more than the step.
    return [max(step - collectives, data) for step, data, collectives in times]


def numbers(times: Sequence[Times]) -> dict[str, float]:
    """Returns a record's numbers, in seconds a step; "slowest" is the rank that spent most on its own."""
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
