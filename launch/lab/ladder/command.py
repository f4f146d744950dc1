"""`matmix ladder RECIPE`: trains the entries of a comparison at several sizes, and fits the law of their losses."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from matmix.launch.jobs.slurm.options import Profile, SlurmWords
from matmix.train.arguments import Recipe, check_overrides
from matmix.train.process.exits import EXIT_OK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matmix.launch.lab.ladder.sizes import Ladder as LadderRuns
    from matmix.launch.many.runs import Ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """Train the entries of a comparison at several sizes, and fit L = E + A N^-a to the losses of each.

    RECIPE is that of a comparison (`matmix compare`), a bundled one such as ladder_small, or the folder of a ladder.
    At each size all entries and controls have equally many parameters without embeddings, and tokens in proportion to
    them. What [comparison] tune names is tuned at the smallest size, and carried to the others by muP. Any field of a
    recipe but the steps can be given too, and goes to all entries; so can --comparison.seeds, --comparison.tolerance,
    --comparison.controls, --comparison.tune and --comparison.tune-seed; --run-dir is the folder of the ladder. The
    same command again goes on where it was stopped, and so does `matmix ladder FOLDER`.
    """

    recipe: Recipe = ""
    """File, folder, or name of a bundled comparison."""
    sizes: str | None = None
    """Parameters without embeddings, as in 0.5M,1M,2M,4M."""
    tokens_per_parameter: float | None = None
    """Training tokens for each parameter of the size; 20 unless the recipe says otherwise."""
    tune_sizes: int | None = None
    """So many of the smallest sizes are tuned each by itself, 1 unless the recipe says otherwise."""
    parallel: int = 1
    """Runs at a time."""
    dry_run: bool = False
    """Show sizes, widths, cost and time, measured by a step of each; train nothing. With --slurm: print the script."""
    only: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME")] = ()
    """This entry or size alone."""
    report: bool = False
    """Only tabulate what is there."""
    no_speed: bool = False
    """With --dry-run: measure no times."""
    slurm: bool = False
    """Submit the runs as a job array, with the options of `matmix launch slurm`."""
    profile: Profile = None
    slurm_options: tyro.conf.OmitArgPrefixes[SlurmWords]

    def begin(self) -> int:
        from matmix.launch.many.runs import begin_alone

        return begin_alone()

    def run(self, rest: list[str], typed: list[str]) -> int:
        from matmix.launch.lab.compare import tuning
        from matmix.launch.lab.compare.config import keep_recipe, tasks_of
        from matmix.launch.lab.ladder import rates, report
        from matmix.launch.lab.ladder.sizes import read_ladder
        from matmix.launch.many import array, planned, runs
        from matmix.train.config import RunConfig

        runs.check_alone("matmix ladder")
        check_overrides(self, [word for word in rest if not word.startswith("--comparison.")], RunConfig)
        runs.check_parallel(self.parallel)
        array.check_slurm(self.slurm, self.profile, self.slurm_options)
        ladder = rates.with_rates(read_ladder(self.recipe, rest, self._given(), self.only))
        only = ladder.settings.named(self.only)
        tasks, first = tasks_of(ladder.comparison, only), rates.tuning_tasks(ladder, only)
        if self.report:
            print(report.write_report(ladder))
            return EXIT_OK
        ready = tasks_of(ladder.comparison, only, ready=True)
        rates.check_rates(ladder)
        planned.check_directories([*first, *ready], tuning.advice(ladder.comparison))
        every = [*rates.tuning_tasks(ladder, only, every=True), *tasks]
        if self.slurm:
            planned.check_same_data(every)
            return array.submit(
                ladder.comparison.home, [*first, *ready], self.profile, self.slurm_options, typed,
                plan=report.plan_text(ladder, only), keep=lambda: keep_recipe(ladder.comparison),
                dry_run=self.dry_run, again=bool(first),
            )  # fmt: skip
        if self.dry_run:
            seconds = {} if self.no_speed else self._seconds(ladder, only)
            print(report.plan_text(ladder, only, seconds, self.parallel))
            return EXIT_OK
        planned.check_data(every)
        return runs.train_and_tell(lambda: self._train(ladder, only), lambda: report.write_report(ladder))

    def _given(self) -> dict[str, Any]:
        """Returns what goes over the table [ladder]."""
        given = {name: getattr(self, name) for name in ("sizes", "tokens_per_parameter", "tune_sizes")}
        return {name: value for name, value in given.items() if value is not None}

    def _seconds(self, ladder: LadderRuns, only: Sequence[str]) -> dict[str, float]:
        """Measures a training step of all that is asked for in this process; returns its seconds by title."""
        import torch

        from matmix.launch.lab.compare.speed import timed_steps
        from matmix.launch.lab.ladder.rates import asked_for
        from matmix.launch.many.runs import threads

        torch.set_num_threads(threads(self.parallel))
        found = {}
        for entry in asked_for(ladder, only):
            times = timed_steps(entry.config, warm_up=1, steps=2, seconds=0)
            found[entry.title] = statistics.median(times) * entry.config.global_batch_size / entry.config.micro_batch(1)
        return found

    def _train(self, ladder: LadderRuns, only: Sequence[str]) -> Ended:
        """Tunes and trains on this host, the smallest sizes first."""
        from matmix.launch.lab.compare import tuning
        from matmix.launch.lab.compare.config import keep_recipe, tasks_of
        from matmix.launch.lab.ladder import rates, report
        from matmix.launch.many import planned, runs

        runs.say(f"{report.plan_text(ladder, only)}\n")
        keep_recipe(ladder.comparison)
        ladder, ended = rates.tune(ladder, only, self.parallel)
        tasks = tasks_of(ladder.comparison, only, ready=True)
        planned.check_directories(tasks, tuning.advice(ladder.comparison))
        return ended if ended.stopped else ended.then(runs.run_tasks(tasks, self.parallel))
