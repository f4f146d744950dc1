"""Counts and times the collectives of this process, and tells which rank the others wait for.

Ranks run the same program, so they begin the same collectives. Of ranks that stand still, the others wait for the one
that has begun the fewest. Of ranks that go on, a step takes the same time on all: what one does not spend waiting in
collectives it spends on its own work or waiting for its data, so the one that waits least is slow.
"""

import contextlib
import dataclasses
import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from matmix.train.engine.base import Engine

FACTOR, SHARE = 1.5, 0.2
"""A rank is slow if its own time is this many times that of the median rank and exceeds it by this share of a step."""
RECORDS = 3
"""Number of records in a row after which a rank is named, or is said to keep up again."""

_FUNCTIONS = (
    *("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "broadcast_object_list"),
    *("all_gather_into_tensor", "reduce_scatter_tensor"),
)


class Times(NamedTuple):
    """Seconds per step of one rank."""

    step: float  # the whole of it
    data: float  # waiting for data
    collectives: float

    @property
    def own(self) -> float:
        """What was not spent in collectives; these may run beside the computation, and both be more than the step."""
        return max(self.step - self.collectives, self.data)


@dataclasses.dataclass(slots=True)
class Count:
    """What is known of this process's collectives."""

    thread: int = 0  # that of the loop
    begun: int = 0
    inside: bool = False  # whether the host is in one
    seconds: float = 0.0  # that the host spent in collectives
    timed: bool = False  # events of the device are recorded
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = dataclasses.field(default_factory=list)


count = Count()


def watch() -> None:
    """Wraps the collectives of torch.distributed in this process, as torch has no hook for them; those of the calling
    thread count, and those of autograd's threads that work for it.

    On a CPU the host waits in them, and its clock tells how long. On a GPU they return at once; events around them, in
    the streams they run in, are read when the device has long passed them, and only of steps that `measure` is told of.
    """
    count.thread = threading.get_ident()
    for name in _FUNCTIONS:
        function = getattr(dist, name)
        if not hasattr(function, "_matmix_counted"):
            setattr(dist, name, _counted(function))


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*arguments: Any, **options: Any) -> Any:
        if count.inside or not _is_of_loop():  # a part of another, or of a save in the background
            return function(*arguments, **options)
        count.begun, count.inside = count.begun + 1, True
        events = None
        if count.timed:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            count.seconds += time.perf_counter() - began
            count.inside = False
            if events is not None:
                events[1].record()
                count.events.append(events)

    counted._matmix_counted = True
    return counted


def _is_of_loop() -> bool:
    # Threads that Python has not started are autograd's.
    return threading.get_ident() == count.thread or isinstance(threading.current_thread(), threading._DummyThread)


class CollectiveClock:
    """Measures the time that steps spend in collectives: waiting for other ranks, and exchanging with them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.steps, self.seconds = 0, 0.0
        count.events.clear()

    @contextlib.contextmanager
    def measure(self, *, sample: bool) -> Iterator[None]:
        """Measures the step inside; on a GPU only where `sample` says so."""
        cuda = self.device.type == "cuda"
        began, count.timed = count.seconds, cuda and sample
        try:
            yield
        finally:
            count.timed = False
        if not cuda:
            self.seconds += count.seconds - began
        self.steps += not cuda or sample

    def per_step(self) -> float:
        """Returns the seconds per measured step since `reset`, without events that the device has not passed yet."""
        passed = [(first, last) for first, last in count.events if last.query()]
        seconds = self.seconds + sum(first.elapsed_time(last) for first, last in passed) / 1e3
        return seconds / max(self.steps, 1)


class Stragglers:
    """Names each rank once that kept the others waiting for several records in a row, until it has kept up again."""

    def __init__(self, engine: Engine, workers: int) -> None:
        self.engine, self.workers = engine, workers
        self.named: set[int] = set()
        self.streaks: dict[int, int] = {}

    def look(self, step: int, own: Times) -> tuple[dict[str, float], list[str]]:
        """Returns (numbers of a record, lines to log) from the times since the last record. Called on all ranks."""
        if self.engine.world_size == 1:
            return {}, []
        mine = torch.tensor(own, dtype=torch.float64, device=self.engine.device)
        times = [Times(*row) for row in self.engine.all_gather(mine).tolist()]
        return numbers(times), self.judge(step, times)

    def judge(self, step: int, times: Sequence[Times]) -> list[str]:
        """Returns a line for each rank that has now been slow long enough, and for each that keeps up again."""
        lines = []
        usual = statistics.median_low(rank.own for rank in times)
        usual_data = statistics.median_low(rank.data for rank in times)
        whole = max(rank.step for rank in times)
        for rank, spent in enumerate(times):
            own, data = spent.own, spent.data
            slow = own > FACTOR * usual and own - usual > SHARE * whole
            changed = slow != (rank in self.named)
            self.streaks[rank] = self.streaks.get(rank, 0) + 1 if changed else 0
            if self.streaks[rank] < RECORDS:
                continue
            self.streaks[rank] = 0
            self.named ^= {rank}
            why = (
                f"needs {(own - data) * 1e3:.3g} ms a step for its own work (the median rank "
                f"{max(usual - usual_data, 0) * 1e3:.3g} ms): look at its node and device"
            )
            if data - usual_data > (own - usual) / 2:
                why = (
                    f"waits {data * 1e3:.3g} ms a step for its data (the median rank {usual_data * 1e3:.3g} ms): look "
                    f"at the disk or network of its node, or raise data.workers (now {self.workers})"
                )
            line = f"the other ranks wait for rank {rank}, which {why}" if slow else f"rank {rank} keeps up again"
            lines.append(f"step {step}: {line}")
        return lines


def numbers(times: Sequence[Times]) -> dict[str, float]:
    """Returns a record's numbers, in seconds a step; "slowest" is the rank that spent most on its own."""
    own = [rank.own for rank in times]
    return {
        "slowest": float(own.index(max(own))),
        "own_max": max(own),
        "own_median": statistics.median(own),
        "data_wait_max": max(rank.data for rank in times),
        "collectives_max": max(rank.collectives for rank in times),
        "collectives_min": min(rank.collectives for rank in times),
    }
