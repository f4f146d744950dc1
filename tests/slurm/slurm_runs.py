"""Runs that are submitted to the tests' cluster with `matmix launch slurm`, and what they leave behind.

A run is told apart from one that nothing happened to by its curve: step, loss and gradient norm of every step, each
step once, bit for bit.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runs
import torch
from cluster import Cluster, wait_until

from matmix.launch.cli import main
from matmix.launch.jobs.attempts import PastAttempt, read_attempts
from matmix.launch.jobs.launches import read_jobs
from matmix.train.checkpoint.manager import CheckpointManager

# A run of some seconds, so that there is time to act once a step of it has been seen; its step takes 10 to 20 ms.
STEPS = 200
SETTINGS = (
    *("--steps", str(STEPS), "--checkpoint.every", "50", "--evaluation.every", "0", "--logging.every", "1"),
    *("--model.n-layers", "1", "--global-batch-size", "4", "--device", "cpu"),
)
# Many ranks start at once on few cores here: none of them is missing only because it is slow.
PATIENT = ("--env", "MATMIX_RENDEZVOUS_SECONDS=240", "--env", "OMP_NUM_THREADS=1")


# tyro, which reads command lines, keeps what it knows of the one being read in a variable of all threads.
_one_by_one = threading.Lock()


def matmix(*words: str) -> int:
    """The exit code of a `matmix` command. It is called, not started: imports would take seconds each time."""
    with _one_by_one:
        return main(list(words))


class SlurmRun:
    """One run directory and the jobs that work on it."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self.cluster, self.path = cluster, path

    def submit(self, dataset: str, *options: str, nodes: int = 1, recipe: str = "debug_mru") -> SlurmRun:
        """`matmix launch slurm` with one rank on each node. options: of the launcher and of the recipe."""
        words = ["slurm", recipe, "--nodes", str(nodes), "--tasks-per-node", "1", "--run-dir", str(self.path)]
        assert matmix("launch", *words, "--data.path", dataset, *PATIENT, *SETTINGS, *options) == 0
        return self

    @property
    def jobs(self) -> list[str]:
        """Ids of all jobs that were submitted for this run, oldest first."""
        return [job.job for job in read_jobs(self.path)]

    @property
    def job(self) -> str:
        return self.jobs[-1]

    # -- while it runs -------------------------------------------------------------------------------------------

    def wait_for_step(self, step: int, job: str | None = None, seconds: float = 240) -> None:
        """Returns when so many steps are done. Fails if the job, by default the newest, has ended by then."""
        job = job or self.job

        def reached() -> bool:
            ended = self.cluster.info(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
            done = self.steps()  # after the job's state: what it has done at its end is not overlooked
            assert not ended, f"job {job} ended at step {done} before anything happened to it: {self.output(job)}"
            return done >= step

        wait_until(reached, f"{self.path.name} to reach step {step}", seconds, poll=0.05)

    # -- what it left behind -------------------------------------------------------------------------------------

    def records(self, kind: str = "train") -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl, also while it is being written."""
        path = self.path / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [record for record in records if record["kind"] == kind]

    def steps(self) -> int:
        records = self.records()
        return records[-1]["step"] if records else 0

    def curve(self) -> list[tuple[int, float, float]]:
        return [(record["step"], record["loss"], record["grad_norm"]) for record in self.records()]

    def weights(self) -> dict[str, torch.Tensor]:
        return runs.weights(self.path)

    def newest_valid_step(self) -> int:
        """Step of the newest checkpoint whose checksums are right, 0 without one."""
        newest = CheckpointManager(self.path / "checkpoints").latest_valid()
        return int(newest.name.removeprefix("step-")) if newest else 0

    def attempts(self) -> list[PastAttempt]:
        return read_attempts(self.path)

    def output(self, job: str | None = None) -> str:
        """The output of a job, by default of the newest: the batch script's and rank 0's."""
        return self.cluster.output(job or self.job)

    def rank_log(self, attempt: int, rank: int) -> str:
        path = self.path / "logs" / self.attempts()[attempt].attempt / f"rank-{rank:05d}.log"
        return path.read_text(encoding="utf-8")


def assert_undisturbed(run: SlurmRun, reference: SlurmRun) -> None:
    """The run has ended as the reference did: every step once, with the same numbers, and the same weights."""
    assert [step for step, *_ in reference.curve()] == list(range(1, STEPS + 1))
    assert run.curve() == reference.curve()
    weights, expected = run.weights(), reference.weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def run_without_slurm(path: Path, dataset: str, ranks: int, *overrides: str) -> None:
    """The same run by processes that know nothing of Slurm; returns when they have ended well."""
    arguments = ["debug_mru", "--run-dir", str(path), "--data.path", dataset, *SETTINGS, *overrides]
    started = start_ranks(arguments, ranks)
    try:
        outputs = [process.communicate(timeout=500)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(outputs)


def start_ranks(arguments: Sequence[str], ranks: int) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(ranks):
        variables = {**common, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
        started.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "matmix.train", *arguments],
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return started
