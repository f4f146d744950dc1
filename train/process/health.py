"""Before the first step: is every node fit to train on? A bad one is named while it is cheap to replace.

Each rank looks at its own device, disk and clock; then all ranks exchange a known pattern around a ring, so that a
wrong byte has a sender and a receiver, and time an all-reduce. Everything together takes a second or two.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from matmix.train.errors import HealthError
from matmix.train.process.distributed import Distributed, barrier, gather_objects, is_distributed
from matmix.train.process.launched import as_ranges, node_name

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 1 << 30
MAX_CLOCK_SECONDS = 5.0
SLOW_FACTOR, SLOW_SECONDS = 4.0, 0.05  # a link is slow if it takes so many times the median, and so long
_RING_BYTES = 1 << 22
_REDUCE_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}


@dataclasses.dataclass(frozen=True, slots=True)
class NodeReport:
    """Holds what one rank found on its node."""

    rank: int
    node: str
    problem: str = ""  # why this rank must not train
    free_bytes: int = 0  # where the run directory lies
    clock: float = 0.0  # seconds since 1970, all ranks at the same moment
    link_seconds: float = 0.0  # to receive the ring's pattern
    bandwidth: float = 0.0  # of an all-reduce as this rank saw it, bytes/s


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """Holds what all ranks found together, the same on every rank."""

    ranks: int
    nodes: int
    bandwidth: float | None  # bus bandwidth of an all-reduce, bytes/s; None in a single process
    free_bytes: int  # the least of all
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        speed = "" if self.bandwidth is None else f", all-reduce {self.bandwidth / 1e9:.2f} GB/s"
        return (
            f"{_count(self.ranks, 'rank')} on {_count(self.nodes, 'node')} healthy{speed}, "
            f"{self.free_bytes / 2**30:.0f} GiB free for the run"
        )


def check_health(distributed: Distributed, run_path: Path) -> Health:
    """Checks all nodes, on all ranks together. Raises HealthError on every rank, naming nodes that are not fit."""
    mine = NodeReport(distributed.rank, node_name(), problem=_find_problem(distributed.device))
    # Problems are told before anything collective touches the devices: a dead one would leave the others waiting.
    _raise_problems(gather_objects(mine))
    free = shutil.disk_usage(_nearest_existing(run_path)).free
    problem, bandwidth, link = "", 0.0, 0.0
    if is_distributed():
        problem, link = _pass_around_ring(distributed)
        bandwidth = _time_all_reduce(distributed)
    barrier()
    mine = dataclasses.replace(
        mine, problem=problem, free_bytes=free, clock=time.time(), link_seconds=link, bandwidth=bandwidth
    )
    reports = gather_objects(mine)
    _raise_problems(reports)
    return Health(
        ranks=len(reports),
        nodes=len({report.node for report in reports}),
        bandwidth=min(report.bandwidth for report in reports) if is_distributed() else None,
        free_bytes=min(report.free_bytes for report in reports),
        warnings=tuple(find_warnings(reports)),
    )


def tell_health(distributed: Distributed, run_dir: str) -> None:
    """Checks all nodes; says one line where there are several ranks, and one for each warning."""
    health = check_health(distributed, Path(tempfile.gettempdir() if "://" in run_dir else run_dir))
    for warning in health.warnings:
        logger.warning(warning)
    if distributed.world_size > 1:
        logger.info(health)


def _find_problem(device: torch.device) -> str:
    """Why this device cannot compute, or ""."""
    try:
        matrix = torch.full((64, 64), 0.5, device=device)
        value = (matrix @ matrix).sum().item()
    except RuntimeError as error:
        return f"device {device} does not compute: {str(error).splitlines()[0]}"
    expected = 64 * 64 * 64 * 0.25
    return "" if value == expected else f"device {device} computes wrong: {value} in place of {expected}"


def _raise_problems(reports: list[NodeReport]) -> None:
    bad = [report for report in reports if report.problem]
    if bad:
        told = "; ".join(f"node {report.node} (rank {report.rank}): {report.problem}" for report in bad[:4])
        more = f"; and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise HealthError(f"health check failed: {told}{more}; exclude the node and start again")


def _pass_around_ring(distributed: Distributed) -> tuple[str, float]:
    """Sends a pattern to the next rank and checks the previous one's: (what is wrong or "", seconds to receive)."""
    rank, world_size = distributed.rank, distributed.world_size
    before = (rank - 1) % world_size
    base = torch.arange(_RING_BYTES // 4, dtype=torch.int32, device=distributed.device)
    received = torch.empty_like(base)
    seconds = math.inf
    for _ in range(2):  # the first exchange opens the connections
        barrier()
        began = time.perf_counter()
        exchange = [
            dist.P2POp(dist.isend, base + rank, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, before),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        wrong = int((received != base + before).sum())  # reading it back waits for the device
        seconds = min(seconds, time.perf_counter() - began)
    problem = f"{wrong} of {received.numel()} numbers from rank {before} arrived wrong" if wrong else ""
    return problem, seconds


def _time_all_reduce(distributed: Distributed) -> float:
    """Bus bandwidth of an all-reduce in bytes/s: what each link carried, comparable for any number of ranks."""
    size = _REDUCE_BYTES[distributed.device.type]
    buffer = torch.zeros(size // 4, device=distributed.device)
    seconds = math.inf
    for _ in range(2):
        barrier()
        began = time.perf_counter()
        dist.all_reduce(buffer)
        buffer[0].item()
        seconds = min(seconds, time.perf_counter() - began)
    return 2 * (distributed.world_size - 1) / distributed.world_size * size / seconds


def find_warnings(reports: list[NodeReport]) -> list[str]:
    """Returns lines, with nodes named, about what does not forbid training but should be looked at."""
    found = []
    by_node: dict[str, NodeReport] = {}
    for report in reports:
        by_node.setdefault(report.node, report)
    now = statistics.median(report.clock for report in by_node.values())
    for node, report in by_node.items():
        if abs(report.clock - now) > MAX_CLOCK_SECONDS:
            direction = "ahead of" if report.clock > now else "behind"
            found.append(
                f"the clock of node {node} is {abs(report.clock - now):.0f} s {direction} the others'; "
                f"training does not mind, times in logs do"
            )
        if report.free_bytes < MIN_FREE_BYTES:
            found.append(f"node {node} sees only {report.free_bytes / 2**20:.0f} MiB free where the run is written")
    usual = statistics.median(report.link_seconds for report in reports)
    slow = [r for r in reports if r.link_seconds > SLOW_SECONDS and r.link_seconds > SLOW_FACTOR * usual]
    if slow:
        nodes = sorted({report.node for report in slow})
        found.append(
            f"slow links into rank{'s' if len(slow) > 1 else ''} {as_ranges(r.rank for r in slow)} "
            f"(node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)}): {max(r.link_seconds for r in slow):.2f} s "
            f"against {usual:.2f} s"
        )
    return found


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
