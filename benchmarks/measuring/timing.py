"""Seconds and bytes of one piece of work: CUDA events where there is a GPU, elsewhere the clock and the process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Quartiles(NamedTuple):
    """Seconds of repeated runs: the median, and what a quarter of them stayed below and above."""

    median: float
    low: float
    high: float


def quartiles(seconds: list[float]) -> Quartiles:
    """The quartiles of at least one time."""
    if len(seconds) == 1:
        return Quartiles(seconds[0], seconds[0], seconds[0])
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Quartiles(median, low, high)


class Clock:
    """Times single runs on one device, each from a cold second-level cache."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            # What a run left in the L2 cache would be read from there by the next one: real models have
            # filled it with other layers by then. Twice its size, written over, evicts it.
            size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
            self.eviction = torch.empty(max(size, 1 << 26), dtype=torch.uint8, device=device)

    def seconds(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """Time of one run, and what it returned."""
        if not self.cuda:
            start = time.perf_counter()
            result = run()
            return time.perf_counter() - start, result
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # The device is busy with this while the host prepares the first launches.
        self.eviction.zero_()
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3, result

    def wall_seconds(self, run: Callable[[], Any], repetitions: int) -> float:
        """Time of one of many runs in a row, the host's work included: what a loop of small steps feels."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        self.synchronize()
        return (time.perf_counter() - start) / repetitions

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """Bytes by which the allocated memory grows, at its highest, while `run` runs; None without a GPU."""
        if not self.cuda:
            return None
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before


def copy_bandwidth(clock: Clock, size: int | None = None, repetitions: int = 15) -> float:
    """Bytes per second, read and written, of the device's best copy of `size` bytes: what a floor is made of.

    By default 1 GiB on a GPU and 64 MiB elsewhere: far beyond every cache.
    """
    size = size or (1 << 30 if clock.cuda else 1 << 26)
    source = torch.ones(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    times = [clock.seconds(lambda: target.copy_(source))[0] for _ in range(repetitions + 3)][3:]
    return 2 * size / statistics.median(times)


def graph_of(run: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """`run`, captured in a CUDA graph: calling what is returned launches all of it at once."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # whatever is prepared at the first calls must not be captured
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay(kept: Any = kept) -> None:  # outputs live in the graph's memory as long as this function
        graph.replay()

    return replay


def kernel_seconds(run: Callable[[], Any], device: torch.device, repetitions: int = 10) -> float:
    """Seconds that the device's kernels themselves take in one run, without the gaps between them."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(repetitions):
            run()
        torch.cuda.synchronize(device)
    return sum(event.self_device_time_total for event in record.key_averages()) * 1e-6 / repetitions


def best_times(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each candidate: the least of `rounds` rounds, every round running all of them.

    Anything else that runs on the machine only ever adds time, so the least is what comes closest to the
    program's own cost; taking turns lets all candidates meet the same conditions.
    """
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best
