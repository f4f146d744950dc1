"""`matmix compare RECIPE`: trains the entries of a comparison at equal parameters, on this host or as a job array."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import tyro

from matmix.data.artifacts import shell_line
from matmix.launch.glue import Column
from matmix.launch.jobs.slurm.options import Profile, SlurmWords
from matmix.train.arguments import Recipe, check_overrides
from matmix.train.process.exits import EXIT_OK, EXIT_STOPPED

if TYPE_CHECKING:
    from matmix.launch.lab.compare.config import Comparison
    from matmix.launch.lab.compare.downstream import Finetuned
    from matmix.launch.many.planned import PlannedRun

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
        """Prepares a process of its own; returns an exit code, 0 = go on."""
        from matmix.launch.many.runs import begin_alone

        return begin_alone()

    def run(self, rest: list[str], typed: list[str]) -> int:
        """Trains, submits or tabulates, and returns the exit code. Raises ValueError (one line) for mistakes."""
        from matmix.launch.lab.compare.config import read_comparison, tasks_of
        from matmix.launch.lab.compare.downstream import GlueSettings, glue_options, plan_of_downstream, read_downstream
        from matmix.launch.lab.compare.report import plan_text, write_report
        from matmix.launch.lab.compare.width import matched
        from matmix.launch.many.planned import check_directories
        from matmix.launch.many.runs import check_alone, check_parallel
        from matmix.train.config import RunConfig

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
        check_directories(tasks, " (--report leaves this run out)")
        glue = GlueSettings(
            settings=self.glue_settings, tasks=self.glue_tasks, seeds=self.glue_seeds, options=tuple(options)
        )
        downstream = read_downstream(self.finetune, comparison, glue)
        plan = "\n".join([plan_text(comparison), *([plan_of_downstream(downstream, tasks)] if downstream else [])])
        if self.slurm:
            if downstream:
                raise ValueError("--finetune trains on this host: give it without --slurm, when the runs are done")
            return self._submit(comparison, tasks, plan, typed)
        if self.dry_run:
            print(plan)
            return EXIT_OK
        return self._train(comparison, tasks, plan, downstream)

    def _train(self, comparison: Comparison, tasks: list[PlannedRun], plan: str, downstream: list[Finetuned]) -> int:
        """Trains, fine-tunes, measures and tabulates on this host; returns the exit code."""
        from matmix.launch.lab.compare.config import keep_recipe
        from matmix.launch.lab.compare.downstream import keep_downstream, train_downstream
        from matmix.launch.lab.compare.report import write_report
        from matmix.launch.lab.compare.speed import is_measured, measure_all
        from matmix.launch.many.planned import check_data
        from matmix.launch.many.runs import describe_failures, listening, run_tasks, say

        check_data(tasks)
        with listening():
            say(f"{plan}\n")
            keep_recipe(comparison)
            keep_downstream(downstream)
            ended = run_tasks(tasks, self.parallel)
            if downstream and not ended.stopped:
                pretrained = [task for task in tasks if task.is_finished()]
                ended = ended.then(train_downstream(downstream, pretrained, self.parallel))
            if ended.stopped:
                say("Stopped; what was running is saved. The same command goes on from there.")
                return EXIT_STOPPED
            unwanted = self.no_speed or self.only or ended.is_busy  # another process takes the cores
            if (self.speed or not (unwanted or is_measured(comparison))) and not measure_all(comparison):
                say("Stopped while speed was measured; no run was going on. The same command goes on from there.")
                return EXIT_STOPPED
        say("\n" + write_report(comparison))
        if ended.failures:
            say("\n" + describe_failures(ended.failures))
        return ended.code

    def _submit(self, comparison: Comparison, tasks: list[PlannedRun], plan: str, typed: list[str]) -> int:
        """Submits the runs that are not finished as an array, a task each; returns the exit code."""
        from matmix.launch.jobs.launches import launch_home
        from matmix.launch.jobs.slurm.options import slurm_options
        from matmix.launch.jobs.slurm.submit import plan_configs
        from matmix.launch.lab.compare.config import keep_recipe

        waiting = [task.config for task in tasks if not task.is_finished()]
        if not waiting:
            print("Nothing to submit: all runs are finished")
            return EXIT_OK
        home = launch_home(str(comparison.home))
        scripts = plan_configs(home, waiting, slurm_options(self.profile, self.slurm_options), typed, is_sweep=True)
        if self.dry_run:
            print(*scripts.scripts.values(), end="")
            return EXIT_OK
        print(plan)
        keep_recipe(comparison)
        job = scripts.submit()
        print(f"Submitted job {job.job} ({job.tasks} tasks): {scripts.folder / 'job.sbatch'}")
        print(f"Follow it:     {shell_line('matmix', 'launch', 'status', home)}")
        print("Tabulate it:   the same recipe and overrides with --report in place of --slurm and its options")
        return EXIT_OK
