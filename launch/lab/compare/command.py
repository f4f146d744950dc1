"""`matmix compare RECIPE`: trains the entries of a comparison at equal parameters, on this host or as a job array."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from matmix.data.artifacts import shell_line
from matmix.launch.glue.settings import Column
from matmix.launch.jobs.launches import launch_home
from matmix.launch.jobs.slurm import submit as slurm
from matmix.launch.jobs.slurm.options import Profile, SlurmWords, slurm_options
from matmix.launch.lab.compare.config import Comparison, keep_recipe, read_comparison
from matmix.launch.lab.compare.downstream import (
    keep_downstream,
    plan_of_downstream,
    read_downstream,
    train_downstream,
)
from matmix.launch.lab.compare.finetuned import Finetuned
from matmix.launch.lab.compare.finetuned_glue import GlueSettings, glue_options
from matmix.launch.lab.compare.report import plan_text, write_report
from matmix.launch.lab.compare.speed import is_measured, measure_all
from matmix.launch.lab.compare.tasks import tasks_of
from matmix.launch.lab.compare.width import matched
from matmix.launch.many.failures import describe_failures
from matmix.launch.many.processes import begin_alone, check_alone, check_parallel, listening, say
from matmix.launch.many.runs import run_tasks
from matmix.launch.many.settings import check_directories
from matmix.launch.many.task import Task, check_data
from matmix.train.arguments import Recipe, check_overrides
from matmix.train.config import RunConfig
from matmix.train.process.exits import EXIT_OK, EXIT_STOPPED

_LEFT_OUT = " (--report leaves this run out)"
_SPEED = tyro.conf.create_mutex_group(required=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Train the entries of a comparison at equal parameters, data and steps, and tabulate their results.

    RECIPE is a TOML file with a table [comparison], the name of a bundled one (matrix_mixers, bidirectional,
    language_models, lion and others; an unknown name lists them), or the folder of a comparison. Any field of a recipe
    can be given too, as in --steps 100, and goes to all entries; so can --comparison.seeds, --comparison.parameters,
    --comparison.tolerance and --comparison.controls; --run-dir is the folder of the comparison. The same command again
    goes on where it was stopped, and so does `matmix compare FOLDER`.

    With --finetune every finished encoder is then fine-tuned on each TASK, a recipe as `matmix finetune` takes it that
    names its examples; the table gets a column for each, and one for the mean over several. TASK glue:DIR stands for
    the tasks of GLUE in a folder with the public download, trained as by `matmix glue`, with a column for each and one
    for their average; its options are --glue-settings, --glue-tasks, --glue-seeds and, for any field of its recipes,
    as in --glue.micro-batch-size 8.
    """

    recipe: Recipe = ""
    """File, folder, or name of a bundled comparison."""
    parallel: int = 1
    """Runs at a time."""
    dry_run: bool = False
    """Show widths, parameters and cost; train nothing. With --slurm: print the script."""
    only: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME")] = ()
    """This entry or variant alone."""
    finetune: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TASK [TASK ...]")] = ()
    """Then fine-tune every encoder on these recipes (TOML files or bundled names), or on GLUE: glue:DIR."""
    glue_settings: Column = "hydra"
    """The published settings, as --settings of `matmix glue`."""
    glue_tasks: tuple[str, ...] = ()
    """Only these tasks of GLUE; default: all that DIR has."""
    glue_seeds: tuple[int, ...] = ()
    """Fine-tune each run with each of them on GLUE; default: with the seed of the run."""
    report: bool = False
    """Only tabulate what is there, fine-tunings too."""
    no_speed: Annotated[bool, _SPEED] = False
    """Do not measure speed and memory."""
    speed: Annotated[bool, _SPEED] = False
    """Measure them again."""
    slurm: bool = False
    """Submit the runs as a job array, with the options of `matmix launch slurm`."""
    profile: Profile = None
    slurm_options: tyro.conf.OmitArgPrefixes[SlurmWords]

    def begin(self) -> int:
        """What comes first in a process that is ours; exit code, 0 = go on."""
        return begin_alone()

    def run(self, rest: list[str], typed: list[str]) -> int:
        """Trains, submits or tabulates; the exit code. Raises ValueError (one line) for the user's mistakes."""
        check_alone("matmix compare")
        rest, options = glue_options(rest)
        check_overrides(self, [word for word in rest if not word.startswith("--comparison.")], RunConfig)
        check_parallel(self.parallel)
        given = sorted(name for name, value in self.slurm_options.items() if value not in (None, ()))
        if (given or self.profile) and not self.slurm:
            raise ValueError(f"--{(given or ['profile'])[0].replace('_', '-')} belongs to --slurm: give both")
        comparison = matched(read_comparison(self.recipe, rest))
        tasks = tasks_of(comparison, self.only)
        if self.report:
            print(write_report(comparison))
            return EXIT_OK
        check_directories(tasks, _LEFT_OUT)
        glue = GlueSettings(
            settings=self.glue_settings, tasks=self.glue_tasks, seeds=self.glue_seeds, options=tuple(options)
        )
        downstream = read_downstream(self.finetune, comparison, glue)
        if self.slurm:
            if downstream:
                raise ValueError("--finetune trains on this host: give it without --slurm, when the runs are done")
            return _submit(comparison, tasks, self, typed)
        if self.dry_run:
            print(_plan(comparison, tasks, downstream))
            return EXIT_OK
        return _train(comparison, tasks, downstream, self)


def _plan(comparison: Comparison, tasks: list[Task], downstream: list[Finetuned]) -> str:
    return "\n".join([plan_text(comparison), *([plan_of_downstream(downstream, tasks)] if downstream else [])])


def _train(comparison: Comparison, tasks: list[Task], downstream: list[Finetuned], given: Compare) -> int:
    check_data(tasks)
    with listening():
        say(_plan(comparison, tasks, downstream) + "\n")
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


def _submit(comparison: Comparison, tasks: list[Task], given: Compare, command: list[str]) -> int:
    """The runs that are not finished as an array, a task each."""
    waiting = [task.config for task in tasks if not task.is_finished()]
    if not waiting:
        print("Nothing to submit: all runs are finished")
        return EXIT_OK
    home = launch_home(str(comparison.home))
    plan = slurm.plan_configs(home, waiting, slurm_options(given.profile, given.slurm_options), command, is_sweep=True)
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
