"""`matmix compare RECIPE`: trains the entries of a comparison at equal parameters, on this host or as a job array."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import tyro

from matmix.launch.glue import Column
from matmix.launch.jobs.slurm.options import Profile, SlurmWords
from matmix.train.arguments import Recipe, check_overrides
from matmix.train.process.exits import EXIT_OK

if TYPE_CHECKING:
    from matmix.launch.lab.compare.config import Comparison
    from matmix.launch.lab.compare.downstream import Finetuned
    from matmix.launch.many.runs import Ended

_SPEED = tyro.conf.create_mutex_group(required=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Train the entries of a comparison at equal parameters, data and steps, and tabulate their results.

    RECIPE is a TOML file with a table [comparison], the name of a bundled one (matrix_mixers, bidirectional,
    language_models, lion and others; an unknown name lists them), or the folder of a comparison. Any field of a recipe
    can be given too, as in --steps 100, and goes to all entries; so can --comparison.seeds, --comparison.parameters,
    --comparison.tolerance, --comparison.controls, --comparison.tune and --comparison.tune-seed; --run-dir is the folder
    of the comparison. The same command again goes on where it was stopped, and so does `matmix compare FOLDER`.

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
        from matmix.launch.many.runs import begin_alone

        return begin_alone()

    def run(self, rest: list[str], typed: list[str]) -> int:
        from matmix.launch.glue.plan import GlueSettings
        from matmix.launch.lab.compare import config, downstream, report, tuning
        from matmix.launch.lab.compare.width import matched
        from matmix.launch.many import array, planned, runs
        from matmix.train.config import RunConfig

        runs.check_alone("matmix compare")
        rest, options = downstream.glue_options(rest)
        check_overrides(self, [word for word in rest if not word.startswith("--comparison.")], RunConfig)
        runs.check_parallel(self.parallel)
        array.check_slurm(self.slurm, self.profile, self.slurm_options)
        comparison = tuning.tuned(matched(config.read_comparison(self.recipe, rest), only=self.only))
        tasks, first = config.tasks_of(comparison, self.only), tuning.tuning_tasks(comparison, self.only)
        if self.report:
            print(report.write_report(comparison))
            return EXIT_OK
        ready = config.tasks_of(comparison, self.only, ready=True)
        planned.check_directories([*first, *ready], tuning.advice(comparison))
        asked = {"settings": self.glue_settings, "tasks": self.glue_tasks, "seeds": self.glue_seeds}
        glue = GlueSettings(**asked, options=tuple(options))
        then = downstream.read_downstream(self.finetune, comparison, glue)
        asked_for = dataclasses.replace(comparison, entries=tuple(config.entries_of(comparison, self.only)))
        plan = "\n".join([report.plan_text(asked_for), *([downstream.plan_text(then, tasks)] if then else [])])
        every = [*tuning.tuning_tasks(comparison, self.only, every=True), *tasks]
        if self.slurm:
            planned.check_same_data(every)
            if then:
                raise ValueError("--finetune trains on this host: give it without --slurm, when the runs are done")
            return array.submit(
                comparison.home, [*first, *ready], self.profile, self.slurm_options, typed,
                plan=plan, keep=lambda: config.keep_recipe(comparison), dry_run=self.dry_run, again=bool(first),
            )  # fmt: skip
        if self.dry_run:
            print(plan)
            return EXIT_OK
        planned.check_data(every)
        return runs.train_and_tell(lambda: self._train(comparison, plan, then), lambda: report.write_report(comparison))

    def _train(self, comparison: Comparison, plan: str, then: list[Finetuned]) -> Ended:
        """Tunes and trains on this host, fine-tunes and measures speed."""
        from matmix.launch.lab.compare import config, downstream, speed, tuning
        from matmix.launch.many import planned, runs

        runs.say(f"{plan}\n")
        config.keep_recipe(comparison)
        for one in then:
            one.keep()
        comparison, ended = tuning.tune(comparison, self.only, self.parallel)
        tasks = config.tasks_of(comparison, self.only, ready=True)
        planned.check_directories(tasks, tuning.advice(comparison))
        if not ended.stopped:
            ended = ended.then(runs.run_tasks(tasks, self.parallel))
        if then and not ended.stopped:
            pretrained = [task for task in tasks if task.is_finished()]
            ended = ended.then(downstream.train_downstream(then, pretrained, self.parallel))
        unwanted = self.no_speed or self.only or ended.is_busy  # another process takes the cores
        wanted = self.speed or not (unwanted or speed.is_measured(comparison))
        if not ended.stopped and wanted and not speed.measure_all(comparison):
            return runs.Ended(ended.failures, stopped=True)
        return ended
