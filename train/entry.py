"""`matmix train RECIPE [--key value ...]`, also `torchrun -m matmix.train RECIPE ...`: the part that runs before torch
is imported."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matmix.data.artifacts import check_utf8
from matmix.train.arguments import Recipe, read_verb
from matmix.train.process import stop
from matmix.train.process.console import begin_process, begin_training, guarded
from matmix.train.recipe_files import bundled_recipes

_PROG = "matmix train"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recipe. The same command again resumes the run from its newest checkpoint.

    RECIPE is a path to a TOML file, a run directory or its URL, or the name of a bundled recipe. Any field of the
    recipe can be given on the command line, as in --optimizer.lr 3e-4; `matmix train RECIPE --help` lists them with the
    recipe's own values and the options of its mixers (of others: --model.layers NAME --help).
    """

    recipe: Recipe = ""
    """Path, run directory, or name of a bundled recipe."""
    dry_run: bool = False
    """Show parameters, FLOPs, memory, steps and tokens, and train nothing."""

    def begin(self) -> int:
        """Prepares a process of its own for training; returns an exit code, 0 = go on."""
        if not self.dry_run:
            return begin_training()
        stop.listen_no_more()
        return 0

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Trains, or shows the size and cost of training; returns the exit code (`matmix.train.process.exits`)."""
        from matmix.train.command import train_recipe

        return train_recipe(self.recipe, rest, dry_run=self.dry_run)


def show_fields(
    read: Callable[[list[str]], tuple[Any, list[str]]], words: Sequence[str], bundled: Callable[[], Iterable[str]]
) -> None:
    """Prints the fields of the recipe that the `words` of a verb name, which ask for help, with their values; where
    they name none, the names of the bundled recipes, which needs no torch. read: turns words into a verb with a
    `recipe`, and the words that it does not know. bundled: returns the names that the verb takes."""
    try:
        verb, rest = read([word for word in words if word not in ("-h", "--help")])
        from matmix.train.recipe import load_phases

        load_phases(verb.recipe, [*rest, "--help"])
    except (ValueError, FileNotFoundError):
        print(f"bundled recipes: {', '.join(bundled())}")
        print("matmix train RECIPE --help lists the fields of one, all of which are options, with their values")


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as the words say and returns the exit code. arguments: None = those of this process, which is then
    ours."""
    own = arguments is None
    if own:
        begin_process()
    words = list(sys.argv[1:] if arguments is None else arguments)

    def train() -> int:
        for word in words:
            check_utf8(word, "{}", "rename the file or folder")
        try:
            verb, rest = read_verb(Train, words, prog=_PROG)
        except SystemExit:
            show_fields(lambda given: read_verb(Train, given, prog=_PROG), words, bundled_recipes)
            return 0
        if own and (code := verb.begin()):
            return code
        return verb.run(rest, ["train", *words])

    return guarded(train, every_rank=True)
