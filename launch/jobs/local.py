"""`matmix launch local`: a run on this host, started again after failures as a cluster would."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from matmix.launch.jobs import attempts, snapshot
from matmix.launch.jobs.attempts import DEFAULT_MAX_REQUEUES
from matmix.launch.jobs.processes import StopRequests, check_counts, environment_for, rank_command, run_ranks
from matmix.launch.jobs.records import Job, add_job, launch_home, note_url
from matmix.launch.jobs.slurm.submit import absolute, check_run_directory
from matmix.train.arguments import Recipe, check_overrides
from matmix.train.config import RunConfig
from matmix.train.process.exits import EXIT_FAILED, EXIT_INTERRUPTED
from matmix.train.process.temporary import make_own_folder
from matmix.train.recipe import load_config, write_config


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalRun:
    """What is run: the config in RUN/launch/<id>, with the code beside it."""

    home: Path
    launch_id: str
    nproc: int
    max_restarts: int

    @property
    def folder(self) -> Path:
        return self.home / "launch" / self.launch_id

    def command(self) -> list[str]:
        """What each rank runs."""
        return rank_command([str(self.folder / "config.toml")])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """Run a recipe on this host, a process for each GPU, and start it again after failures as a cluster would.

    Ctrl-C saves and ends the run; the same command goes on from there.
    """

    recipe: Recipe = ""
    """Path, run directory, or name of a bundled recipe."""
    nproc: int
    """Processes on this host, one a GPU."""
    max_restarts: int = DEFAULT_MAX_REQUEUES
    """How often a failed run is started again without having got further, as --max-requeues of slurm; 0 = never."""
    dry_run: bool = False
    """Print what would run, and run nothing."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Checks the config, writes RUN/launch/<id>/ and runs it. Raises ValueError for the user's mistakes."""
        check_overrides(self, rest, RunConfig)
        check_counts(self, "nproc")
        config = absolute(load_config(self.recipe, rest))
        config.micro_batch(self.nproc)
        check_run_directory(config)
        home = launch_home(config.run_dir)
        run = LocalRun(
            home=home, launch_id=snapshot.new_launch_id(home), nproc=self.nproc, max_restarts=self.max_restarts
        )
        if self.dry_run:
            print(f"{run.nproc} x {shlex.join(run.command())}")
            return 0
        snapshot.take_snapshot(run.folder)
        write_config(config, run.folder / "config.toml")
        note_url(home, config.run_dir)
        this = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), "command": list(typed)}
        counts = {"nproc": run.nproc, "max_restarts": run.max_restarts}
        add_job(home, Job(kind="local", launch=run.launch_id, **this, **counts))
        return run_local(run)


def read_local(home: Path, job: Job) -> LocalRun:
    """An earlier local launch."""
    return LocalRun(home=home, launch_id=job.launch, nproc=job.nproc, max_restarts=job.max_restarts)


def _new_name(run: LocalRun) -> str:
    """What the attempts from now on are called: the launch's name, with -2 and so on where it is run again."""
    used = {attempts.job_of(attempt.attempt) for attempt in attempts.read_attempts(run.home)}
    number, name = 1, run.launch_id
    while name in used:
        number += 1
        name = f"{run.launch_id}-again-{number}"
    return name


def run_local(run: LocalRun) -> int:
    """Attempts until the run has finished, stopped, or failed once too often; returns the exit code of the last."""
    print(f"{run.nproc} x {shlex.join(run.command())}", flush=True)
    folder = make_own_folder()
    with StopRequests() as requests:
        number, job = 0, _new_name(run)
        while True:
            name = f"{job}.{number}"
            environment = environment_for(run.nproc, name)
            own_code = str(run.folder / "code")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [own_code, os.environ.get("PYTHONPATH")]))
            attempts.begin(run.home, name, socket.gethostname())
            ended = run_ranks(run.command(), run.nproc, environment, requests, folder)
            attempt, decision = attempts.conclude(
                run.home,
                name,
                ended,
                max_requeues=run.max_restarts,
                signalled=requests.asked,
                ending="it was told to stop" if requests.asked else "",
            )
            code = EXIT_INTERRUPTED if requests.at_once else attempt.code
            if not decision.again:
                if attempt.failed:
                    print(f"attempt {name}: {decision.why}", flush=True)
                return EXIT_FAILED if code is None else code
            print(f"attempt {name}: starting again: {decision.why}", flush=True)
            number += 1
