"""Hardware, versions, date and commit of a measurement."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

import torch

from matmix.launch.lab.benchmarks.peers.packages import HOW, versions
from matmix.train.run.revision import git_revision


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
