"""`matmix glue SOURCE DIR`: fine-tunes an encoder on the tasks of GLUE, and tabulates the scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from matmix.launch.glue import Column
from matmix.train.arguments import check_overrides
from matmix.train.process.exits import EXIT_OK, EXIT_STOPPED, EXIT_USER

if TYPE_CHECKING:
    from matmix.launch.glue.plan import Found, Plan

_OURS = {"--seed": "--seeds", "--run-dir": "--out", "--data.examples.train": "DIR", "--data.examples.validation": "DIR"}
"""Options of recipes that differ between runs, and which of this verb's says them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glue:
    """Fine-tune an encoder on the tasks of GLUE with several seeds, and tabulate the scores. The same command again
    goes on where it was stopped.

    SOURCE is a run directory or its URL, an export, or a checkpoint of the papers' code; DIR a folder with the files of
    the public GLUE download. RTE, MRPC and STS-B begin with the weights of the run on MNLI with the same seed. Any
    field of a recipe can be given too, as in --micro-batch-size 8, and goes to all tasks.
    """

    first: ClassVar[tuple[str, str]] = ("DIR", "SOURCE DIR [--key value ...], or --check DIR")

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")] = ""
    """Run directory or its URL, export, or checkpoint."""
    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")] = ""
    """Holds the folders CoLA, SST-2, MRPC, QQP, STS-B, MNLI, QNLI and RTE."""
    check: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """Only say what is in this folder, and what is missing."""
    settings: Column = "hydra"
    """The published settings: hydra; bert, as for MosaicBERT; lion: hydra's with the learning rate 1e-5."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each task for each of them."""
    tasks: tuple[str, ...] = ()
    """Only these; default: all that DIR has."""
    parallel: int = 1
    """Runs at a time."""
    out: Path | None = None
    """Folder of the runs and the table; default: runs/NAME-glue."""
    report: bool = False
    """Only tabulate what is there."""
    dry_run: bool = False
    """Show the runs and their settings; train nothing."""

    @property
    def recipe(self) -> str:
        """Returns the word before options of recipes."""
        return self.check or self.folder

    def begin(self) -> int:
        """Prepares a process of its own; returns an exit code, 0 = go on."""
        from matmix.launch.many.runs import begin_alone

        return begin_alone()

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Checks, trains or tabulates, and returns the exit code. Raises ValueError (one line) for mistakes."""
        from matmix.launch.glue.plan import look, notes_on, plan_text
        from matmix.launch.glue.results import collect, train, write_table
        from matmix.launch.many.planned import check_directories
        from matmix.launch.many.runs import check_alone, check_parallel, describe_failures, listening, say
        from matmix.train.config import RunConfig

        check_alone("matmix glue")
        check_overrides(self, rest, RunConfig)
        if self.check:
            found = look(Path(self.check))
            print("\n".join(task.words() for task in found))
            return EXIT_USER if any(task.problems for task in found) else EXIT_OK
        found, plan = self._plan(list(rest))
        runs = plan.runs()
        if self.dry_run:
            print(plan_text(plan, found, runs))
            return EXIT_OK
        notes = notes_on(found)
        if self.report:
            print(write_table(plan, collect(plan, runs), notes))
            return EXIT_OK
        check_parallel(self.parallel)
        check_directories(runs, " (--report leaves this run out)", option="--out")
        with listening():
            ended = train([(plan, runs)], self.parallel)
        if ended.stopped:
            say("Stopped; what was running is saved. The same command goes on from there.")
            return EXIT_STOPPED
        say("\n" + write_table(plan, collect(plan, runs), notes))
        if ended.failures:
            say("\n" + describe_failures(ended.failures))
        return ended.code

    def _plan(self, rest: list[str]) -> tuple[list[Found], Plan]:
        """Returns the files and the plan of the runs. Raises FileNotFoundError or ValueError (one line)."""
        from matmix.launch.glue.plan import Plan, check_options, whole
        from matmix.launch.glue.tasks import named

        check_options(rest, _OURS)
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds:
            raise ValueError("--seeds names a seed twice" if self.seeds else "--seeds names no seed")
        found = whole(Path(self.folder), named(self.tasks))
        name = self.source.rstrip("/").rpartition("/")[2]
        plan = Plan(
            source=self.source,
            name=name,
            folder=Path(self.folder),
            out=self.out or Path("runs") / f"{name}-glue",
            tasks=[task.task for task in found],
            seeds=self.seeds,
            settings=self.settings,
            others=rest,
        )
        return found, plan
