"""`matmix recipes`: the recipes that come with matmix, and the text of one to start from."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from matmix.train.recipe_files import bundled_comparisons, bundled_recipes, find_recipe

_WIDTH = 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipes:
    """List the recipes that come with matmix, with a line on each; or print one, to start one of your own from.

    `matmix recipes NAME > mine.toml` writes one, and `matmix train mine.toml` trains it.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = ""
    """Recipe to print; none: list all."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Prints; the exit code. Raises FileNotFoundError (one line) where there is no such recipe."""
        print(find_recipe(self.name).read_text() if self.name else listed(), end="")
        return 0


def grouped() -> dict[str, dict[str, Path]]:
    """Command that takes them -> name -> path of the bundled recipes."""
    recipes = bundled_recipes()
    fine_tuning = {name: path for name, path in recipes.items() if _fine_tunes(path)}
    return {
        "matmix train NAME": {name: path for name, path in recipes.items() if name not in fine_tuning},
        "matmix compare NAME": bundled_comparisons(),
        "matmix finetune RUN NAME": fine_tuning,
    }


def listed() -> str:
    """All recipes by the verb that takes them, a line each."""
    lines = []
    for command, found in grouped().items():
        width = max(map(len, found)) + 4
        lines.append(f"{command}\n")
        lines += [
            f"  {name:{width - 2}}{textwrap.shorten(about(path), _WIDTH - width, placeholder=' ...')}"
            for name, path in found.items()
        ]
        lines.append("")
    return "\n".join([*lines, "matmix recipes NAME prints one.", ""])


def about(path: Path) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return " ".join(line.lstrip("# ") for line in lines).split(". ")[0].rstrip(".")


def _fine_tunes(path: Path) -> bool:
    return path.stem.startswith("finetune") or path.parent.name in ("finetuning", "glue")
