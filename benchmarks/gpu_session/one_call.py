"""Runs one call of the part `kernels` for a profiler: `python -P -m matmix.benchmarks.gpu_session.one_call
DEVICE TOKENS NAME`. Only the second run, after everything was compiled, lies between the marks that ncu looks at."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from matmix.benchmarks.gpu_session.record import Limit, Session
from matmix.benchmarks.gpu_session.sweep import again
from matmix.benchmarks.gpu_session.times import launches_of, settings_for


def main(arguments: list[str]) -> None:
    """The command."""
    device, tokens, name = arguments
    session = Session(torch.device(device), Path(), False, Limit(600.0))
    launches = launches_of(name, settings_for(int(tokens), session))
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for found in launches:
        again(found)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
