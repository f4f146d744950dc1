"""`gpu-session`: what half an hour on a GPU is spent on.

Four parts, each below nine minutes: whether the kernels are right (correctness), which tiles are the fastest (sweep),
what each kernel takes (kernels), and how ours compares with others (peers). Each writes what it finds into a file of
its own as it goes, leaves out what that file holds already, and stops before its time is over: started again, it goes
on. Without a GPU, --device cpu runs the same parts at toy sizes, the kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from matmix.benchmarks.measuring.settings import RESULTS, device_name, device_of, slug
from matmix.data.processes import end_with

PARTS = {"correctness": "correctness", "sweep": "sweep", "kernels": "times", "peers": "peers"}
"""Name -> module of this package, in the order in which they run."""
MINUTES = 8.5
GRACE = 15.0
"""Seconds beyond its time after which a part's process is ended."""
DONE, WRONG, LEFT, LOST = 0, 1, 3, 4
"""Exit statuses: all done and right; something is wrong or failed; something is left; the device answers no more."""
RESTARTS = 20


def main(arguments: list[str]) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    device = device_of(options.device)
    if not 0 < options.minutes <= 600:
        raise ValueError(f"--minutes {options.minutes}: must be more than 0, and at most 600")
    out = options.out or RESULTS / f"gpu-session-{slug(device_name(device))}"
    if options.here:
        if not options.part:
            raise ValueError("--here: say which --part")
        return run_here(options.part, device, out, options.minutes * 60, options.only)
    statuses = {}
    for part in [options.part] if options.part else PARTS:
        print(f"\n{part}\n", flush=True)
        statuses[part] = run_part(part, device, out, options.minutes * 60, options.only)
    words = {DONE: "done", WRONG: "done, with failures", LEFT: "not finished: start it again to go on"}
    for part, status in statuses.items():
        print(f"{part:<14}{words.get(status, f'ended with status {status}')}; record: {out / part}.json")
    found = set(statuses.values())
    return next((status for status in (WRONG, LOST, LEFT) if status in found), max(found))


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    parser = argparse.ArgumentParser(
        prog="python -P -m matmix.benchmarks gpu-session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=list(PARTS), help="only this part (default: all, one after the other)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 ... or cpu (default: cuda)")
    parser.add_argument(
        "--out", type=Path, help="folder of the records (default: results/gpu-session-DEVICE of the benchmarks)"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for each part (default: {MINUTES:g})")
    parser.add_argument("--only", default="", metavar="TEXT", help="only what has this text in its name")
    parser.add_argument("--here", action="store_true", help="in this process, as the command itself starts each part")
    return parser


def run_part(part: str, device: torch.device, out: Path, seconds: float, only: str) -> int:
    """Run a part in a process of its own, and again where that was lost before its time was over; returns its exit
    status."""
    end = time.monotonic() + seconds
    status = LEFT
    for _ in range(RESTARTS):
        left = end - time.monotonic()
        if left <= 0:
            break
        before = _pieces(out, part)
        command = [sys.executable, "-P", "-m", "matmix.benchmarks", "gpu-session", "--here", "--part", part]
        command += ["--device", str(device), "--out", str(out), "--minutes", str(left / 60), "--only", only]
        environment = dict(os.environ)
        if device.type == "cpu":
            environment["TRITON_INTERPRET"] = "1"  # before Triton is imported
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        with _terminated_as_an_exception():
            try:
                status = process.wait(left + GRACE)
            except subprocess.TimeoutExpired:
                print(f"{part}: ended, as it took longer than its time", flush=True)
                return LEFT
            finally:
                _end(process)
        if status in (DONE, WRONG, 2, LEFT) or _pieces(out, part) == before:
            break
        print(f"{part}: its process ended with status {status}; going on in another one", flush=True)
    return status


@contextlib.contextmanager
def _terminated_as_an_exception() -> Iterator[None]:
    """In this block SIGTERM leaves through `finally`, as Ctrl-C does."""

    def leave(*_) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen) -> None:
    """End what is left of a part, and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _pieces(out: Path, part: str) -> object:
    """What a part's record holds, to see whether it has changed."""
    try:
        return json.loads((out / f"{part}.json").read_text(encoding="utf-8")).get("pieces")
    except (OSError, ValueError):
        return None


def run_here(part: str, device: torch.device, out: Path, seconds: float, only: str) -> int:
    """Run a part in this process; returns the exit status."""
    from matmix.benchmarks.gpu_session.record import DeviceLost, Limit, Session

    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("--here --device cpu: set TRITON_INTERPRET=1, so that kernels are interpreted")
    end_with(os.getppid(), signal.SIGKILL)  # nothing is to run on alone on the device
    session = Session(device, out, toy=device.type == "cpu", limit=Limit(seconds), only=only)
    run = importlib.import_module(f"matmix.benchmarks.gpu_session.{PARTS[part]}").run
    try:
        left = run(session)
    except DeviceLost as lost:
        print(f"{part}: the device answers no more after: {lost}", flush=True)
        return LOST
    if left:
        print(f"{part}: {len(left)} left, from {left[0]} on; start it again to go on", flush=True)
    wrong = session.record(part, tiles=part != "sweep").wrong()
    for line in wrong:
        print(f"{part}: {line}", flush=True)
    return LEFT if left else WRONG if wrong else DONE
