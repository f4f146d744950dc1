"""What a kill costs on this host, besides the steps since the last checkpoint:

    .venv/bin/python -P tests/faults/measure_restart.py --repeats 5

`matmix launch local` trains the smallest recipe on two ranks; one of them is killed (SIGKILL) again and again, and the
run comes back by itself. Measured is the time from the kill to the first step that was not done before.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from matmix.data.artifacts import read_json_lines
from matmix.launch.jobs.attempts import read_attempts


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
    """The first value of `condition` that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.005)
    return value


def last_step(run: Path) -> int:
    """The last step in metrics.jsonl."""
    return max((record.get("step", 0) for record in read_json_lines(run / "metrics.jsonl")), default=0)


def saved_step(run: Path) -> int:
    """The newest checkpoint's."""
    return max((int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*")), default=0)


def kill_a_rank(launcher: psutil.Process) -> None:
    """Sends SIGKILL to the second rank."""
    for process in launcher.children(recursive=True):
        if process.environ().get("RANK") == "1" and "matmix.launch.jobs.rank" in process.cmdline():
            os.kill(process.pid, signal.SIGKILL)
            return
    raise LookupError("there is no second rank")


def measure(launcher: psutil.Process, run: Path) -> dict[str, float]:
    """Seconds of one kill."""
    begun = len(read_attempts(run))
    wait_until(lambda: saved_step(run) > 0, "a checkpoint")
    done = last_step(run)
    killed = time.monotonic()
    kill_a_rank(launcher)
    wait_until(lambda: len(read_attempts(run)) > begun, "the next attempt")
    started = time.monotonic()
    wait_until(lambda: last_step(run) < done or last_step(run) > done + 1, "the records to be taken up")
    wait_until(lambda: last_step(run) > done, "a new step")
    stepped = time.monotonic()
    return {"noticed": started - killed, "started": stepped - started, "total": stepped - killed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="kills of one run (default: 5)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder) / "data", Path(folder) / "run"
        command = [sys.executable, "-P", "-m", "matmix.launch.cli"]
        prepare = ["prepare", "bundled:shakespeare", "--out", str(data), "--vocab-size", "512"]
        subprocess.run([*command, *prepare, "--validation-fraction", "0.03"], check=True, stdout=subprocess.DEVNULL)
        train = ["launch", "local", "debug_mru", "--nproc", "2", "--max-restarts", str(options.repeats + 1)]
        train += ["--data.path", str(data), "--run-dir", str(run), "--steps", "1000000", "--checkpoint.every", "50"]
        train += ["--evaluation.every", "0", "--logging.every", "1", "--device", "cpu"]
        with subprocess.Popen([*command, *train], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                measured = []
                for _ in range(options.repeats):
                    goal = last_step(run) + 100
                    wait_until(lambda goal=goal: last_step(run) > goal, "steps")
                    measured.append(measure(psutil.Process(process.pid), run))
                    print({name: round(value, 2) for name, value in measured[-1].items()}, flush=True)
            finally:
                process.kill()
        time.sleep(3)  # for the ranks to end before the folder does
    print(f"mean of {len(measured)} kills, {os.cpu_count()} cores:")
    for name, what in {
        "noticed": "the other rank and the launcher end, the next attempt begins",
        "started": "processes, imports, health check, loading, and the steps since the checkpoint again",
        "total": "kill to the first step that was not done before",
    }.items():
        values = [each[name] for each in measured]
        print(f"  {name:<8}{sum(values) / len(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
