"""`matmix compare RECIPE`: trains the entries of a comparison at equal parameters, on this host or as a job array."""

from __future__ import annotations

import argparse
import contextlib
import shlex

from matmix.launch.lab.compare.config import Comparison, keep_recipe
from matmix.launch.lab.compare.processes import cores, listening
from matmix.launch.lab.compare.runs import Task
from matmix.launch.launch import Parser, check_overrides, split_recipe
from matmix.train.process.exits import EXIT_FAILED, EXIT_OK, EXIT_STOPPED

_DESCRIPTION = "Train the entries of a comparison at equal parameters, data and steps, and tabulate what they came to."
_EPILOG = """RECIPE is a TOML file with a table [comparison], or the name of a bundled one: {recipes}. Any field of a
recipe can be given too, as in --steps 100, and goes to all entries; so can --comparison.seeds, --comparison.parameters,
--comparison.tolerance and --comparison.controls; --run-dir is the folder of the comparison. The same command again goes
on where it was stopped, and so does `matmix compare FOLDER`."""


def _parser(*, slurm: bool) -> Parser:
    from matmix.train.recipe import bundled_comparisons

    parser = Parser(
        prog="matmix compare",
        usage="matmix compare RECIPE [options] [--key value ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(recipes=", ".join(bundled_comparisons())),
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="show widths, parameters and cost; train nothing")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this entry or variant alone (repeatable)"
    )
    parser.add_argument("--report", action="store_true", help="only tabulate what is there")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--no-speed", action="store_true", help="do not measure speed and memory")
    speed.add_argument("--speed", action="store_true", help="measure them again")
    parser.add_argument("--slurm", action="store_true", help="as a job array, with the options of matmix launch slurm")
    if slurm:
        from matmix.launch.jobs.slurm import options as slurm_options

        slurm_options.add_arguments(parser)
        parser.add_argument("--profile", metavar="NAME", help="site profile (~/.config/matmix/clusters.toml)")
    return parser


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code. Raises ValueError (one line) for the user's mistakes."""
    parser = _parser(slurm="--slurm" in arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        parser.print_help()
        return 0 if arguments else 2
    recipe, rest = split_recipe(arguments, parser.prog)
    given, overrides = parser.parse_known_args(rest)
    check_overrides(parser, [word for word in overrides if not word.startswith("--comparison.")])
    if not 1 <= given.parallel <= cores():
        raise ValueError(f"--parallel must lie between 1 and the {cores()} cores here, got {given.parallel}")

    from matmix.launch.lab.compare.config import read_comparison
    from matmix.launch.lab.compare.report import plan_text, write_report
    from matmix.launch.lab.compare.runs import tasks_of
    from matmix.launch.lab.compare.settings import check_directories
    from matmix.launch.lab.compare.width import matched

    comparison = matched(read_comparison(recipe, overrides))
    tasks = tasks_of(comparison, given.only)
    if given.report:
        print(write_report(comparison))
        return EXIT_OK
    check_directories(tasks)
    if given.slurm:
        return _submit(comparison, tasks, given, ["compare", *arguments])
    if given.dry_run:
        print(plan_text(comparison))
        return EXIT_OK
    return _train(comparison, tasks, given)


def _train(comparison: Comparison, tasks: list[Task], given: argparse.Namespace) -> int:
    from matmix.launch.lab.compare.report import plan_text, write_report
    from matmix.launch.lab.compare.runs import check_data, describe_failures, run_tasks
    from matmix.launch.lab.compare.speed import is_measured, measure_all

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that was closed: the runs are saved nevertheless
            print(text, flush=True)

    check_data(tasks)
    with listening():
        tell(plan_text(comparison) + "\n")
        keep_recipe(comparison)
        ended = run_tasks(tasks, given.parallel, tell)
        if ended.stopped:
            tell("Stopped; what was running is saved. The same command goes on from there.")
            return EXIT_STOPPED
        busy = any(failure.is_busy for failure in ended.failures)  # and takes the cores that speed is measured on
        unwanted = given.no_speed or given.only or busy
        if (given.speed or not (unwanted or is_measured(comparison))) and not measure_all(comparison, tell):
            tell("Stopped while speed was measured; no run was going on. The same command goes on from there.")
            return EXIT_STOPPED
    tell("\n" + write_report(comparison))
    if ended.failures:
        tell("\n" + describe_failures(ended.failures))
    if all(failure.is_busy for failure in ended.failures):
        return EXIT_STOPPED if busy else EXIT_OK
    return EXIT_FAILED


def _submit(comparison: Comparison, tasks: list[Task], given: argparse.Namespace, command: list[str]) -> int:
    """The runs that are not finished as an array, a task each."""
    from matmix.launch.jobs.records import launch_home
    from matmix.launch.jobs.slurm import submit as slurm
    from matmix.launch.lab.compare.report import plan_text
    from matmix.launch.launch import slurm_options_of

    waiting = [task.config for task in tasks if not task.is_finished()]
    if not waiting:
        print("Nothing to submit: all runs are finished")
        return EXIT_OK
    home = launch_home(str(comparison.home))
    plan = slurm.plan_configs(home, waiting, slurm_options_of(given), command, is_sweep=True)
    script = slurm.render_launch(plan)
    if given.dry_run:
        print(script, end="")
        return EXIT_OK
    print(plan_text(comparison))
    keep_recipe(comparison)
    job = slurm.submit_launch(plan, script)
    print(f"Submitted job {job.job} ({job.tasks} tasks): {plan.folder / 'job.sbatch'}")
    print(f"Follow it:     matmix launch status {shlex.quote(str(home))}")
    print("Tabulate it:   the same recipe and overrides with --report in place of --slurm and its options")
    return EXIT_OK
