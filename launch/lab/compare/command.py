"""`matmix compare RECIPE`: trains the entries of a comparison at equal parameters, on this host or as a job array."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from matmix.launch.glue.settings import Column
from matmix.launch.jobs.slurm.options import Profile, SlurmWords
from matmix.train.arguments import Recipe, check_overrides

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
        """Prepares a process of its own; returns an exit code, 0 = go on."""
        from matmix.launch.many.processes import begin_alone

        return begin_alone()

    def run(self, rest: list[str], typed: list[str]) -> int:
        """Trains, submits or tabulates, and returns the exit code. Raises ValueError (one line) for mistakes."""
        from matmix.launch.lab.compare.config import read_comparison
        from matmix.launch.lab.compare.downstream import read_downstream
        from matmix.launch.lab.compare.finetuned_glue import GlueSettings, glue_options
        from matmix.launch.lab.compare.report import write_report
        from matmix.launch.lab.compare.tasks import tasks_of
        from matmix.launch.lab.compare.training import describe, submit, train
        from matmix.launch.lab.compare.width import matched
        from matmix.launch.many.processes import check_alone, check_parallel
        from matmix.launch.many.settings import check_directories
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
            return 0
        check_directories(tasks, _LEFT_OUT)
        glue = GlueSettings(
            settings=self.glue_settings, tasks=self.glue_tasks, seeds=self.glue_seeds, options=tuple(options)
        )
        downstream = read_downstream(self.finetune, comparison, glue)
        if self.slurm:
            if downstream:
                raise ValueError("--finetune trains on this host: give it without --slurm, when the runs are done")
            return submit(comparison, tasks, self, typed)
        if self.dry_run:
            print(describe(comparison, tasks, downstream))
            return 0
        return train(comparison, tasks, downstream, self)
