"""Many runs as a Slurm job array, a task each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matmix.data.artifacts import shell_line
from matmix.train.process.exits import EXIT_OK

if TYPE_CHECKING:
    from matmix.launch.jobs.slurm.options import Profile, SlurmWords
    from matmix.launch.many.planned import PlannedRun


def check_slurm(slurm: bool, profile: Profile, words: SlurmWords) -> None:
    """Raises ValueError (one line) for a profile or options of Slurm without --slurm."""
    given = sorted(name for name, value in words.items() if value not in (None, ()))
    if (given or profile) and not slurm:
        raise ValueError(f"--{(given or ['profile'])[0].replace('_', '-')} belongs to --slurm: give both")


def submit(
    home: Path, tasks: Sequence[PlannedRun], profile: Profile, words: SlurmWords, typed: list[str], *,
    plan: str, keep: Callable[[], None], dry_run: bool, again: bool,
) -> int:  # fmt: skip
    """Submits the runs that are not finished; returns the exit code.

    home: the folder of the runs. typed: the command's words. plan: what is printed first. keep: writes down what the
    runs are of, before they begin. dry_run: print the script and submit nothing. again: the runs tune, and others
    follow.
    """
    from matmix.launch.jobs.launches import launch_home
    from matmix.launch.jobs.slurm.options import slurm_options
    from matmix.launch.jobs.slurm.submit import plan_runs

    waiting = [[task.config] for task in tasks if not task.is_finished()]
    if not waiting:
        print("Nothing to submit: all runs are finished")
        return EXIT_OK
    there = launch_home(str(home))
    scripts = plan_runs(there, waiting, slurm_options(profile, words), typed, is_sweep=True)
    if dry_run:
        print(*scripts.scripts.values(), end="")
        return EXIT_OK
    print(plan)
    keep()
    job = scripts.submit()
    print(f"Submitted job {job.job} ({job.tasks} tasks): {scripts.folder / 'job.sbatch'}")
    print(f"Follow it:     {shell_line('matmix', 'launch', 'status', there)}")
    if again:
        print("Go on:         these runs tune; when they are done, give the same command again, and so on")
    print("Tabulate it:   the same recipe and overrides with --report in place of --slurm and its options")
    return EXIT_OK
