"""`matmix finetune SOURCE TASK [--key value ...]`: trains a pretrained encoder on labelled examples, or an image
classifier on other pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from matmix.data.artifacts import shell_line
from matmix.train.arguments import Recipe

if TYPE_CHECKING:
    from matmix.train.config import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune:
    """Train a pretrained encoder on labelled examples, or an image classifier on other pictures. The same command again
    resumes the run.

    SOURCE is a run directory or its URL, an export, or a checkpoint of the papers' code. TASK is a recipe (a TOML file
    or a bundled name), or a task: sequence_classification, multi_label, regression, token_classification,
    question_answering, multiple_choice, embedding; of pictures: image_classification. Any field of a recipe can be
    given, as in --data.examples.train FILE, --epochs 5 or --optimizer.lr 1e-5; for pictures --data.images.path DIR and
    --data.images.size 384. Where nobody gives them, the rate fits the width of the model, and the epochs the number of
    examples: at least 300 steps.

    With --seeds 0 1 2 each seed is a run of its own, RUN_DIR/seed-0 and so on, on one GPU or its share of the cores.
    At the end comes a table of the mean, the sample standard deviation and each seed's value of all metrics, which
    RUN_DIR/seeds.json holds unrounded. The same command goes on where it was stopped.

    On several GPUs: torchrun --nproc-per-node=8 -m matmix.launch.cli finetune SOURCE TASK [--key value ...]; or
    --write-recipe FILE, and then matmix launch local (or torchrun, slurm) FILE.
    """

    first: ClassVar[tuple[str, str]] = ("task", "SOURCE TASK [--key value ...]")

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Run directory or its URL, export, or checkpoint."""
    recipe: Annotated[Recipe, tyro.conf.arg(metavar="TASK")] = ""
    """Recipe, or name of a task."""
    step: int = 0
    """Checkpoint of a run to start from; 0 = the newest."""
    from_scratch: bool = False
    """Draw all weights from the seed, as a control: of SOURCE only model, tokenizer and special tokens are taken."""
    seeds: tuple[int, ...] = ()
    """Train with each of these seeds, and tell mean and deviation of the scores."""
    parallel: int = 1
    """With --seeds: runs at a time."""
    dry_run: bool = False
    """Show parameters, FLOPs, memory and steps, and train nothing. With --seeds: of the first."""
    write_recipe: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the whole recipe of the run into this file, for matmix launch, and train nothing."""

    def begin(self) -> int:
        from matmix.launch.many.runs import begin_alone, is_one_of_several
        from matmix.train.entry import Train

        trains = not (self.dry_run or self.seeds or self.write_recipe)
        if not trains and is_one_of_several():
            return begin_alone()
        return Train(recipe=self.recipe, dry_run=not trains).begin()

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        from matmix.launch.many.runs import check_alone, check_parallel, is_one_of_several
        from matmix.launch.many.scores import tasks_of_seeds, train_seeds
        from matmix.train.command import train_phases
        from matmix.train.process import logs
        from matmix.train.process.distributed import rank_and_world_size
        from matmix.use.finetuning import finetuning_config

        if self.seeds and not self.dry_run:
            check_alone("--seeds")
        if self.write_recipe is not None and is_one_of_several():
            raise ValueError("--write-recipe writes a file and trains nothing: give it in one process")
        options = {"step": self.step, "from_scratch": self.from_scratch}
        with logs.shown("info", rank=rank_and_world_size()[0]):
            config = finetuning_config(self.source, self.recipe, list(rest), **options)
        if self.seeds:
            if any(word.partition("=")[0] == "--seed" for word in rest):
                raise ValueError("--seed and --seeds are both given: keep one of them")
            if self.write_recipe is not None:
                raise ValueError("--write-recipe writes the recipe of one run: give it without --seeds")
            check_parallel(self.parallel)
            tasks = tasks_of_seeds(config, self.seeds)
            if not self.dry_run:
                return train_seeds(tasks, Path(config.run_dir), self.parallel)
            return train_phases([tasks[0].config], dry_run=True)
        if "--seeds" in typed:
            raise ValueError("--seeds is given without a seed")
        if self.parallel != 1:
            raise ValueError("--parallel belongs to --seeds: give both")
        if self.write_recipe is None:
            return train_phases([config], dry_run=self.dry_run)
        return _write(config, self.write_recipe)


def _write(config: RunConfig, path: Path) -> int:
    """Writes the recipe of a run into a new file; returns the exit code."""
    from matmix.train.recipe import write_config

    if path.exists():
        raise ValueError(f"--write-recipe: there is a {path} already; give the name of a new file")
    write_config(config, path)
    ranks = shell_line("matmix", "launch", "local", path, "--nproc", "N")
    print(f"{path}: a run in {config.run_dir}. Next: {ranks}, or {shell_line('matmix', 'train', path)}")
    return 0
