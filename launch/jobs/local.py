"""`matmix launch local`: a run on this host, started again after failures as a cluster would."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from matmix.data.artifacts import shell_line
from matmix.data.storage.files import first_free
from matmix.launch.jobs import attempts, launches
from matmix.launch.jobs.attempts import DEFAULT_MAX_REQUEUES
from matmix.launch.jobs.launches import Job, add_job, launch_home, note_url
from matmix.launch.jobs.processes import StopRequests, check_counts, environment_for, rank_command, run_ranks
from matmix.train.arguments import Recipe, check_overrides
from matmix.train.process.exits import EXIT_FAILED, EXIT_INTERRUPTED
from matmix.train.process.node_folders import make_own_folder


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
        from matmix.launch.jobs.slurm.submit import checked  # imports torch, and --help should not
        from matmix.train.config import RunConfig
        from matmix.train.recipe import load_config, write_config

        check_overrides(self, rest, RunConfig)
        check_counts(self, "nproc")
        config = checked(load_config(self.recipe, rest), self.nproc)
        home = launch_home(config.run_dir)
        launch, command = launches.new_launch_id(home), list(typed)
        job = Job(kind="local", launch=launch, command=command, nproc=self.nproc, max_restarts=self.max_restarts)
        folder = home / "launch" / job.launch
        if self.dry_run:
            print(f"{job.nproc} x {shell_line(*_command(folder))}")
            return 0
        launches.take_snapshot(folder)
        write_config(config, folder / "config.toml")
        note_url(home, config.run_dir)
        return run_local(home, job)


def _command(folder: Path) -> list[str]:
    """Returns the command of each rank, with the config in RUN/launch/<id>."""
    return rank_command([str(folder / "config.toml")])


def run_local(home: Path, job: Job) -> int:
    """Attempts until the run has finished, stopped, or failed once too often; returns the exit code of the last. The
    job is recorded in jobs.jsonl as that of this process."""
    add_job(home, dataclasses.replace(job, time=time.time(), pid=os.getpid(), host=socket.gethostname()))
    folder, own = home / "launch" / job.launch, make_own_folder()
    print(f"{job.nproc} x {shell_line(*_command(folder))}", flush=True)
    # Attempts are called after the launch, with -again-2 and so on where it is run again.
    used = {attempts.job_of(attempt.attempt) for attempt in attempts.read_attempts(home)}
    start = first_free(Path(job.launch), lambda name: str(name) in used, "-again-")
    with StopRequests() as requests:
        for number in itertools.count():
            name = f"{start}.{number}"
            environment = environment_for(job.nproc, name)
            paths = [str(folder / "code"), os.environ.get("PYTHONPATH")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            attempts.begin(home, name, socket.gethostname())
            ended = run_ranks(_command(folder), job.nproc, environment, requests, own)
            ending = "it was told to stop" if requests.asked else ""
            attempt, decision = attempts.conclude(
                home, name, ended, max_requeues=job.max_restarts, signalled=requests.asked, ending=ending
            )
            if not decision.again:
                break
            print(f"attempt {name}: starting again: {decision.why}", flush=True)
    if attempt.failed:
        print(f"attempt {name}: {decision.why}", flush=True)
    code = EXIT_INTERRUPTED if requests.at_once else attempt.code
    return EXIT_FAILED if code is None else code
