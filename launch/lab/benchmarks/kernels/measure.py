"""Fair timing on a shared machine: all candidates in turn, many rounds, best time each; peak memory of a
process.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from matmix.launch.lab.benchmarks.kernels.packages import HOW, versions
from matmix.train.run.revision import git_revision


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


def peak_memory(run: Callable[[], object]) -> int:
    """Bytes by which the resident set of this process grows, at its highest, while `run` runs (Linux).

    The kernel keeps the high-water mark; writing 5 to clear_refs sets it back to the present size.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def environment(dtype: str = "float32") -> dict[str, object]:
    """Hardware, versions, date and commit, to be kept with every result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "versions": {"torch": torch.__version__, **versions("triton", *HOW)},
        "commit": git_revision(),
        "dtype": dtype,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)} ({torch.backends.cpu.get_cpu_capability()})" if names else "unknown"
