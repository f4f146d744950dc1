"""How commands end: the user's mistakes are one line and exit code 2, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from matmix.train.errors import RunFailure

USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)

job_output: TextIO | None = None
"""Where errors are shown as well, when a rank's own output goes to a file."""


def begin_process() -> None:
    """What a process of ours does before it imports torch.

    `python -m` and `torchrun -m` put the working directory on sys.path; from the root of a checkout our folders `data`
    and `kernels` would then answer imports that other packages make for themselves, so the root is taken off again.
    Idle OpenMP threads are told to sleep: spinning, they made training on 2 cores up to 7 times slower as soon as
    another process wanted one of them, and were no faster without.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    root = Path(__file__).resolve().parent.parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != root]


def report(error: BaseException, *, every_rank: bool = False) -> None:
    """Prints an error as one line: once, or with the rank's number where ranks may fail for different reasons."""
    rank = int(os.environ.get("RANK", "0"))
    if rank and not every_rank:
        return
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.strerror}: {error.filename2 or error.filename}"  # of a copy, the target is the second
    for stream in (sys.stderr, job_output):
        if stream is not None:
            print(f"matmix: error: {f'[rank {rank}] ' if rank else ''}{text}", file=stream, flush=True)


def guarded(command: Callable[[], int], *, every_rank: bool = False) -> int:
    """Runs a command and returns its exit code: 2 for the user's mistakes, 1 for a diverged model or a system that
    failed (full disk, killed process), 130 for Ctrl-C.

    MATMIX_TRACEBACK=1 lets errors through with their tracebacks.
    """
    if os.environ.get("MATMIX_TRACEBACK"):
        return command()
    try:
        return command()
    except USER_ERRORS as error:
        report(error, every_rank=every_rank)
        return 2
    except BrokenPipeError:
        sys.stdout = None  # the reader (head, less) has left; nothing more is to be flushed at exit
        return 0
    except (RunFailure, OverflowError, OSError) as error:
        report(error, every_rank=every_rank)
        return 1
    except KeyboardInterrupt:
        print("matmix: interrupted", file=sys.stderr)
        return 130
