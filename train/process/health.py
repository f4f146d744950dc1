"""Asks before the first step whether every node is fit to train on; a bad one is named while it is cheap to replace."""

import dataclasses
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
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
    bandwidth: float = 0.0  # of an all-reduce as this rank saw it, bytes/s; 0 in a single process


def check_health(distributed: Distributed, run_dir: str | Path) -> list[NodeReport]:
    """Checks all nodes, on all ranks together, says what it finds and returns it. Raises HealthError. Each rank looks
    at its own device, disk and clock; then all exchange a known pattern around a ring, so that a wrong byte has a
    sender and a receiver, and time an all-reduce."""
    mine = NodeReport(distributed.rank, node_name(), problem=_find_problem(distributed.device))
    # Problems are told before anything collective touches the devices: a dead one would leave the others waiting.
    _raise_problems(gather_objects(mine))
    path = Path(tempfile.gettempdir() if "://" in str(run_dir) else run_dir).absolute()
    here = next(folder for folder in (path, *path.parents) if folder.exists())
    mine = dataclasses.replace(mine, free_bytes=shutil.disk_usage(here).free)
    if is_distributed():
        problem, link = _pass_around_ring(distributed)
        bandwidth = _all_reduce_bandwidth(distributed)
        mine = dataclasses.replace(mine, problem=problem, link_seconds=link, bandwidth=bandwidth)
    barrier()
    reports = gather_objects(dataclasses.replace(mine, clock=time.time()))
    _raise_problems(reports)
    for warning in find_warnings(reports):
        logger.warning(warning)
    if distributed.world_size > 1:
        logger.info(describe(reports))
    return reports


def describe(reports: Sequence[NodeReport]) -> str:
    """Says in one line what the reports of sound nodes have in common."""
    ranks, nodes = len(reports), len({report.node for report in reports})
    bandwidth = min(report.bandwidth for report in reports)
    speed = f", all-reduce {bandwidth / 1e9:.2f} GB/s" if bandwidth else ""
    free = min(report.free_bytes for report in reports)
    return f"{ranks} rank{_s(ranks)} on {nodes} node{_s(nodes)} healthy{speed}, {free / 2**30:.0f} GiB free for the run"


def _s(number: int) -> str:
    return "" if number == 1 else "s"


def _find_problem(device: torch.device) -> str:
    """Says why this device cannot compute, or ""."""
    try:
        matrix = torch.full((64, 64), 0.5, device=device)
        value = (matrix @ matrix).sum().item()
    except RuntimeError as error:
        return f"device {device} does not compute: {str(error).splitlines()[0]}"
    expected = 64 * 64 * 64 * 0.25
    return "" if value == expected else f"device {device} computes wrong: {value} in place of {expected}"


def _raise_problems(reports: Sequence[NodeReport]) -> None:
    bad = [f"node {report.node} (rank {report.rank}): {report.problem}" for report in reports if report.problem]
    if bad:
        more = f"; and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise HealthError(f"health check failed: {'; '.join(bad[:4])}{more}; exclude the node and start again")


def _fastest(action: Callable[[], object]) -> float:
    """Returns the seconds of the faster of two runs on all ranks; the first one opens the connections."""
    seconds = []
    for _ in range(2):
        barrier()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _pass_around_ring(distributed: Distributed) -> tuple[str, float]:
    """Sends a pattern to the next rank and checks the previous one's: (what is wrong or "", seconds to receive)."""
    rank, world_size = distributed.rank, distributed.world_size
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    base = torch.arange(_RING_BYTES // 4, dtype=torch.int32, device=distributed.device)
    received = torch.empty_like(base)

    def exchange() -> int:
        pair = [dist.P2POp(dist.isend, base + rank, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return int((received != base + before).sum())  # reading it back waits for the device

    seconds = _fastest(exchange)
    wrong = int((received != base + before).sum())
    return f"{wrong} of {received.numel()} numbers from rank {before} arrived wrong" if wrong else "", seconds


def _all_reduce_bandwidth(distributed: Distributed) -> float:
    """Measures an all-reduce's bus bandwidth, bytes/s: what each link carried, comparable for any number of ranks."""
    size = _REDUCE_BYTES[distributed.device.type]
    buffer = torch.zeros(size // 4, device=distributed.device)
    seconds = _fastest(lambda: (dist.all_reduce(buffer), buffer[0].item()))
    return 2 * (distributed.world_size - 1) / distributed.world_size * size / seconds


def find_warnings(reports: Sequence[NodeReport]) -> list[str]:
    """Returns lines, with nodes named, about what does not forbid training but should be looked at."""
    warnings = []
    by_node = {report.node: report for report in reversed(reports)}
    now = statistics.median(report.clock for report in by_node.values())
    for node, report in sorted(by_node.items(), key=lambda item: item[1].rank):
        if abs(report.clock - now) > MAX_CLOCK_SECONDS:
            direction = "ahead of" if report.clock > now else "behind"
            warnings.append(
                f"the clock of node {node} is {abs(report.clock - now):.0f} s {direction} the others'; "
                f"training does not mind, times in logs do"
            )
        if report.free_bytes < MIN_FREE_BYTES:
            warnings.append(f"node {node} sees only {report.free_bytes / 2**20:.0f} MiB free where the run is written")
    usual = statistics.median(report.link_seconds for report in reports)
    slow = [r for r in reports if r.link_seconds > SLOW_SECONDS and r.link_seconds > SLOW_FACTOR * usual]
    if slow:
        nodes = sorted({report.node for report in slow})
        warnings.append(
            f"slow links into rank{_s(len(slow))} {as_ranges(report.rank for report in slow)} (node{_s(len(nodes))} "
            f"{', '.join(nodes)}): {max(report.link_seconds for report in slow):.2f} s against {usual:.2f} s"
        )
    return warnings
