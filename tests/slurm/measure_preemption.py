"""What a preemption costs, on a real Slurm cluster on this host:

    .venv/bin/python -P tests/slurm/measure_preemption.py --repeats 5

A run on two nodes is told by USR2 to save and stop, comes back by itself, and goes on; the time from the signal to the
first new step is split by what can be seen from outside. The cluster's requeue delay is the shortest that Slurm takes
(cred_expire = 5); with Slurm's default of 120 the job waits about 115 s longer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[up] / name) for up, name in ((0, ""), (1, "support"), (1, "support/runs"))
)

from cluster import Cluster, wait_until, why_unavailable
from slurm_runs import SlurmRun

from matmix.data.artifacts import read_json_lines

PHASES = {
    "save": "signal to the end of all ranks, everything saved",
    "requeue": "to the start of the batch script on its new nodes",
    "start": "processes, imports, meeting, health check, to the checkpoint found",
    "resume": "loading it, to the end of the first new step",
}


def preempt(run: SlurmRun) -> dict[str, float]:
    """Seconds of each phase of one preemption of a run that is training."""
    begun, resumed = len(_lines(run, "begun")), run.output().count("resumed from")
    signalled = time.time()
    run.cluster.run("scancel", "--batch", "--signal=USR2", run.job)
    ended = _when(lambda: len(_lines(run, "ended")) == begun, "the attempt to end")
    started = _when(lambda: len(_lines(run, "begun")) == begun + 1, "the next attempt")
    last = run.steps()  # what was done before the stop; nobody trains now
    found = _when(lambda: run.output().count("resumed from") == resumed + 1, "the checkpoint to be found")
    stepped = _when(lambda: run.steps() > last, "a new step")
    moments = (signalled, ended, started, found, stepped)
    phases = {name: after - before for name, before, after in zip(PHASES, moments, moments[1:], strict=False)}
    return {**phases, "total": stepped - signalled}


def _when(check: Callable[[], Any], what: str) -> float:
    wait_until(check, what, seconds=300, poll=0.01)
    return time.time()


def _lines(run: SlurmRun, key: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(run.path / "launch" / "attempts.jsonl") if key in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="preemptions of one run (default: 3)")
    parser.add_argument("--recipe-option", nargs="*", default=[], metavar="WORD", help="as in --model.d-model 256")
    options = parser.parse_args()
    if reason := why_unavailable():
        print(reason, file=sys.stderr)
        return 2
    measured = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        dataset = _prepare(Path(folder))
        with Cluster.started(Path(folder) / "slurm", {"main": 2}) as cluster:
            os.environ["SLURM_CONF"] = str(cluster.config)
            run = SlurmRun(cluster, Path(folder) / "run")
            run.submit(dataset, "--steps", "1000000", *options.recipe_option, nodes=2)
            for _ in range(options.repeats):
                run.wait_for_step(run.steps() + 20)
                measured.append(preempt(run))
                print({name: round(value, 2) for name, value in measured[-1].items()})
    print(f"mean of {len(measured)} preemptions, {os.cpu_count()} cores:")
    for name, what in {**PHASES, "total": "signal to the first new step"}.items():
        values = [each[name] for each in measured]
        print(f"  {name:<8}{sum(values) / len(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})  {what}")
    return 0


def _prepare(folder: Path) -> str:
    from matmix.data.prepare.command import prepare
    from matmix.data.prepare.text import PrepareConfig

    out = str(folder / "dataset")
    prepare(PrepareConfig(inputs=("bundled:shakespeare",), out=out, vocab_size=512, validation_fraction=0.03))
    return out


if __name__ == "__main__":
    sys.exit(main())
