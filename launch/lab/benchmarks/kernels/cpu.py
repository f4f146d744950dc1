"""`cpu`: all ops against their peers on the CPU, float32, forward and backward.

Prints one line per case with forward + backward times and, per peer, how many times our time and our peak
memory it takes; writes the same with hardware, versions and date as JSON (--out). `--only TEXT` picks cases
by their title. Peak memory is the growth of the resident set of a fresh process that runs one candidate once.

Leave the machine alone meanwhile: OpenMP's threads spin while they wait, so that any other busy process makes
code of many short parallel regions look many times slower (OMP_WAIT_POLICY=PASSIVE tames that, at a price).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from matmix.launch.lab.benchmarks.kernels.cases import CPU_CASES
from matmix.launch.lab.benchmarks.kernels.measure import best_times, environment, peak_memory
from matmix.launch.lab.benchmarks.kernels.plot import draw
from matmix.launch.lab.benchmarks.kernels.settings import RESULTS

SLOW = 2.0
"""Seconds: a candidate that takes longer both times that it is first tried is not timed again."""


def measured_case(title: str, rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Best seconds and peak bytes of every candidate of a case."""
    torch.manual_seed(0)
    candidates = CPU_CASES[title]()
    first = best_times(candidates, 2)
    quick = {name: run for name, run in candidates.items() if first[name] < SLOW}
    times = first | best_times(quick, rounds)
    return {name: {"seconds": times[name], "peak_bytes": memory_of(title, name, threads)} for name in candidates}


def memory_of(title: str, candidate: str, threads: int) -> int:
    """Peak memory of one candidate in a process of its own, where every large block goes back to the
    system.
    """
    command = [sys.executable, "-m", "matmix.launch.lab.benchmarks.kernels", "memory", title, candidate]
    environ = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def memory_command(title: str, candidate: str) -> None:
    torch.manual_seed(0)
    run = CPU_CASES[title]()[candidate]
    run()  # libraries make their own buffers at the first call
    print(peak_memory(run))


def describe(title: str, found: dict[str, dict[str, float]]) -> str:
    ours = found["ours"]
    lines = [f"{title}\n  {'ours':<22}{ours['seconds'] * 1e3:10.1f} ms {ours['peak_bytes'] / 2**20:9.1f} MB"]
    for name, peer in found.items():
        if name != "ours":
            faster = peer["seconds"] / ours["seconds"]
            share = ours["peak_bytes"] / max(peer["peak_bytes"], 1)
            lines.append(
                f"  {name:<22}{peer['seconds'] * 1e3:10.1f} ms {peer['peak_bytes'] / 2**20:9.1f} MB"
                f"   ours is {faster:.2f} x as fast with {share:.2f} x the memory"
            )
    return "\n".join(lines)


def cpu_command(only: str, rounds: int, threads: int, out: Path, plot: Path | None) -> None:
    torch.set_num_threads(threads)
    results = {}
    for title in CPU_CASES:
        if only in title:
            results[title] = measured_case(title, rounds, threads)
            print(describe(title, results[title]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment(), "cases": results}
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {out}")
    if plot is not None:
        draw(record, plot)
        print(f"drawn in {plot}")


def main(arguments: list[str]) -> None:
    """The command `cpu`."""
    parser = argparse.ArgumentParser(prog="python -m matmix.launch.lab.benchmarks.kernels cpu", description=__doc__)
    parser.add_argument("--only", default="", help="measure the cases whose title contains this text")
    parser.add_argument("--rounds", type=int, default=15, help="how often the candidates of a case take turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.json")
    parser.add_argument("--plot", type=Path, default=None, help="also draw the ratios into this file (PNG, SVG, PDF)")
    options = parser.parse_args(arguments)
    cpu_command(options.only, options.rounds, options.threads, options.out, options.plot)


def memory_main(arguments: list[str]) -> None:
    """The command `memory`."""
    parser = argparse.ArgumentParser(prog="python -m matmix.launch.lab.benchmarks.kernels memory")
    parser.add_argument("title", choices=list(CPU_CASES))
    parser.add_argument("candidate")
    options = parser.parse_args(arguments)
    memory_command(options.title, options.candidate)
