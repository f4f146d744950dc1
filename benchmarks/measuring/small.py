"""Small shapes, where the host's work outweighs the device's: with and without a CUDA graph, against kernel time."""

from __future__ import annotations

from typing import Any

from matmix.benchmarks.measuring.report import NAME_WIDTH, milliseconds
from matmix.benchmarks.measuring.settings import Settings
from matmix.benchmarks.measuring.suite import Candidate, Case, both_passes, survives
from matmix.benchmarks.measuring.timing import Clock, graph_of, kernel_seconds

BATCH, SEQLEN = 16, 128
REPETITIONS = 50

READING = """\
  one by one   a training step through it as the host launches it, the host's time included
  graph        the same captured in a CUDA graph and replayed
  kernels      what its kernels take by themselves, the gaps between them left out
  graph /      graph over kernels: 1 is the least possible"""


def measure_small(case: Case, clock: Clock, settings: Settings) -> dict[str, Any]:
    """Forward and backward of every candidate of the case, printed and returned."""
    print(f"\n{case.label}\n{READING}")
    print(f"{'':<{NAME_WIDTH}}{'one by one':>12}{'graph':>10}{'kernels':>10}{'graph /':>10}")
    print(f"{'':<{NAME_WIDTH}}{'ms':>12}{'ms':>10}{'ms':>10}{'kernels':>10}")
    records = []
    for candidate in case.candidates:
        record: dict[str, Any] = {"candidate": candidate.name, "status": candidate.missing or "ok"}
        if settings.wanted(candidate.name):
            if not candidate.missing:
                survives(lambda c=candidate, r=record: _measure(c, r, clock, settings), record)
            print(_row(record), flush=True)
            records.append(record)
    if not clock.cuda:
        print("  (graphs and kernel times need a GPU)")
    return {"label": case.label, "seqlen": case.seqlen, "batch": case.batch, "candidates": records}


def _measure(candidate: Candidate, record: dict[str, Any], clock: Clock, settings: Settings) -> None:
    def run() -> Any:
        return both_passes(candidate)

    for _ in range(3):
        run()
    repetitions = REPETITIONS if clock.cuda else min(REPETITIONS, settings.rounds)
    record["one_by_one"] = clock.wall_seconds(run, repetitions)
    if clock.cuda:
        record["kernels"] = kernel_seconds(run, clock.device)
        replay = graph_of(run, clock.device)
        record["graph"] = clock.wall_seconds(replay, repetitions)
        record["graph_over_kernels"] = record["graph"] / record["kernels"]


def _row(record: dict[str, Any]) -> str:
    name = f"  {record['candidate']:<{NAME_WIDTH - 2}}"
    if "one_by_one" not in record:
        return f"{name} {record['status']}"

    def column(key: str) -> str:
        return milliseconds(record[key]) if key in record else "-"

    ratio = f"{record['graph_over_kernels']:.2f}" if "graph_over_kernels" in record else "-"
    words = "" if record["status"] == "ok" else f"  {record['status']}"
    return f"{name}{column('one_by_one'):>12}{column('graph'):>10}{column('kernels'):>10}{ratio:>10}{words}"
