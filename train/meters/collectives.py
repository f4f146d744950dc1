"""How many collectives this process has begun, which one it is in, and how long they took.

Ranks run the same program, so they begin the same collectives: of ranks that stand still, the one that has begun the
fewest is the one that the others wait for; of ranks that go on, the one that waits least is the one that is slow.

torch has no hook for this that engines share, so the functions of torch.distributed that they call are wrapped. On a
CPU the host waits in them, and its clock tells how long. On a GPU they return at once; events around them, in the
streams they run in, are read when the device has long passed them, and only of steps that `measure` is told of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_FUNCTIONS = (
    *("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "broadcast_object_list"),
    *("all_gather_into_tensor", "reduce_scatter_tensor"),
)


@dataclasses.dataclass(slots=True)
class _Count:
    thread: int = 0  # that of the loop
    begun: int = 0
    inside: str = ""  # the collective that the host is in, if it is
    seconds: float = 0.0  # that the host spent in them
    timed: bool = False  # events of a device are taken
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = dataclasses.field(default_factory=list)


_count = _Count()


def begun() -> int:
    """The number of collectives that this process has begun."""
    return _count.begun


def inside() -> str:
    """The name of the collective that the host is in, or ""."""
    return _count.inside


def watch() -> None:
    """Wraps the collectives of torch.distributed in this process, once, however often it is called; the calling thread
    is the one whose collectives count, with those of autograd's threads that work for it."""
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
    """The time that steps spend in collectives: waiting for other ranks, and exchanging with them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.steps, self.seconds = 0, 0.0
        _count.events.clear()

    @contextlib.contextmanager
    def measure(self, *, sample: bool) -> Iterator[None]:
        """Context around a step. sample: whether the step is one of those that are measured on a GPU."""
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
        """Seconds per step that was measured since `reset`. The host waits for nothing: events that the device has not
        passed are left out."""
        passed = [(first, last) for first, last in _count.events if last.query()]
        seconds = self.seconds + sum(first.elapsed_time(last) for first, last in passed) / 1e3
        return seconds / max(self.steps, 1)
