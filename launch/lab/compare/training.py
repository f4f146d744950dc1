"""Trains the entries of a comparison on this host, or submits them as a job array."""

from __future__ import annotations

from typing import Any

from matmix.data.artifacts import shell_line
from matmix.launch.jobs.launches import launch_home
from matmix.launch.jobs.slurm.options import slurm_options
from matmix.launch.jobs.slurm.submit import plan_configs
from matmix.launch.lab.compare.config import Comparison, keep_recipe
from matmix.launch.lab.compare.downstream import (
    keep_downstream,
    plan_of_downstream,
    train_downstream,
)
from matmix.launch.lab.compare.finetuned import Finetuned
from matmix.launch.lab.compare.report import plan_text, write_report
from matmix.launch.lab.compare.speed import is_measured, measure_all
from matmix.launch.many.failures import describe_failures
from matmix.launch.many.processes import listening, say
from matmix.launch.many.runs import run_tasks
from matmix.launch.many.task import Task, check_data
from matmix.train.process.exits import EXIT_OK, EXIT_STOPPED


def describe(comparison: Comparison, tasks: list[Task], downstream: list[Finetuned]) -> str:
    """Returns the widths, parameters and cost of the runs, and of their fine-tunings."""
    return "\n".join([plan_text(comparison), *([plan_of_downstream(downstream, tasks)] if downstream else [])])


def train(comparison: Comparison, tasks: list[Task], downstream: list[Finetuned], given: Any) -> int:
    """Trains, fine-tunes, measures and tabulates; returns the exit code. given: the options of the verb."""
    check_data(tasks)
    with listening():
        say(describe(comparison, tasks, downstream) + "\n")
        keep_recipe(comparison)
        keep_downstream(downstream)
        ended = run_tasks(tasks, given.parallel)
        if downstream and not ended.stopped:
            pretrained = [task for task in tasks if task.is_finished()]
            ended = ended.then(train_downstream(downstream, pretrained, given.parallel))
        if ended.stopped:
            say("Stopped; what was running is saved. The same command goes on from there.")
            return EXIT_STOPPED
        unwanted = given.no_speed or given.only or ended.is_busy  # another process takes the cores
        if (given.speed or not (unwanted or is_measured(comparison))) and not measure_all(comparison):
            say("Stopped while speed was measured; no run was going on. The same command goes on from there.")
            return EXIT_STOPPED
    say("\n" + write_report(comparison))
    if ended.failures:
        say("\n" + describe_failures(ended.failures))
    return ended.code


def submit(comparison: Comparison, tasks: list[Task], given: Any, command: list[str]) -> int:
    """Submits the runs that are not finished as an array, a task each; returns the exit code. given: the options of
    the verb; command: its words."""
    waiting = [task.config for task in tasks if not task.is_finished()]
    if not waiting:
        print("Nothing to submit: all runs are finished")
        return EXIT_OK
    home = launch_home(str(comparison.home))
    plan = plan_configs(home, waiting, slurm_options(given.profile, given.slurm_options), command, is_sweep=True)
    if given.dry_run:
        print(*plan.scripts.values(), end="")
        return EXIT_OK
    print(plan_text(comparison))
    keep_recipe(comparison)
    job = plan.submit()
    print(f"Submitted job {job.job} ({job.tasks} tasks): {plan.folder / 'job.sbatch'}")
    print(f"Follow it:     {shell_line('matmix', 'launch', 'status', home)}")
    print("Tabulate it:   the same recipe and overrides with --report in place of --slurm and its options")
    return EXIT_OK
