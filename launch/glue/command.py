"""`matmix glue SOURCE DIR`: fine-tunes an encoder on the tasks of GLUE, and tabulates the scores."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from matmix.launch.glue import Column
from matmix.train.arguments import check_overrides
from matmix.train.process.exits import EXIT_OK, EXIT_USER

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
        from matmix.launch.many.runs import begin_alone

        return begin_alone()

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        from matmix.launch.glue import plan, results
        from matmix.launch.glue.tasks import named
        from matmix.launch.many import planned, runs
        from matmix.train.config import RunConfig

        runs.check_alone("matmix glue")
        check_overrides(self, rest, RunConfig)
        if self.check:
            files = plan.look(Path(self.check))
            print("\n".join(one.words() for one in files))
            return EXIT_USER if any(one.problems for one in files) else EXIT_OK
        plan.check_options(rest, _OURS)
        if not self.seeds:
            raise ValueError("--seeds names no seed")
        asked = {"folder": self.folder, "settings": self.settings, "seeds": self.seeds, "options": tuple(rest)}
        files = plan.whole(Path(self.folder), named(self.tasks))
        settings = plan.GlueSettings(tasks=tuple(one.task.name for one in files), **asked)
        name = self.source.rstrip("/").rpartition("/")[2]
        out = self.out or Path("runs") / f"{name}-glue"
        its = plan.Plan(source=self.source, name=name, out=out, asked=settings, notes=plan.notes_on(files))
        if self.dry_run:
            print(plan.plan_text(its, files))
            return EXIT_OK
        if self.report:
            print(results.write_table(its, results.collect(its)))
            return EXIT_OK
        runs.check_parallel(self.parallel)
        planned.check_directories(its.runs, " (--report leaves this run out)", option="--out")
        return runs.train_and_tell(
            lambda: results.train([its], self.parallel), lambda: results.write_table(its, results.collect(its))
        )
