"""Lists what there is: `matmix recipes`, and `matmix checkpoints RUN`, which also converts a checkpoint."""

import dataclasses
import itertools
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from matmix.train.arguments import RunFolder
from matmix.train.checkpoint.manifest import CheckpointFacts, Listing, list_checkpoints
from matmix.train.recipe_files import bundled_comparisons, bundled_recipes, find_recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Make a run that begins with a checkpoint of another one, in a form that every engine reads.

    It holds weights, optimizer moments, step counts and the position in the data, for any number of ranks.
    `matmix train OTHER_RUN --engine.name ...` goes on.
    """

    source: RunFolder
    out: Annotated[str, tyro.conf.arg(metavar="OTHER_RUN")]
    """Run to make (must not hold anything else)."""
    step: int | None = None
    """Checkpoint to convert; default: the newest."""
    max_file_bytes: int = 5 * 10**9
    """Size of a file of tensors."""


_Other = Annotated[Convert, tyro.conf.subcommand("convert")] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """List the checkpoints of a run, and whether they are whole; the exit code is 1 if one is damaged, else 0.

    Of each: step, tokens (or images) seen, size, the engine and the number of ranks that wrote it, and when.
    `matmix checkpoints convert RUN OTHER_RUN` makes a run of one of them that every engine reads.
    """

    source: RunFolder = ""
    verify: bool = False
    """Read every file and compare checksums (else: presence and sizes)."""
    other: tyro.conf.OmitArgPrefixes[tyro.conf.DisallowNone[tyro.conf.OmitSubcommandPrefixes[_Other]]] = None

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        if self.other is not None:
            from matmix.use.exporting import convert_run

            if self.source:
                raise ValueError(f"convert takes one run, got {self.source} before it")
            other = self.other
            convert_run(other.source, other.out, step=other.step, max_file_bytes=other.max_file_bytes)
            return 0
        if not self.source:
            raise ValueError("no run given: matmix checkpoints RUN, or matmix checkpoints convert RUN --out OTHER_RUN")
        run, verify = Path(self.source), None
        if self.verify or not (run / "config.toml").is_file():  # what follows imports torch, which a list need not
            from matmix.train.checkpoint.files import find_problem
            from matmix.train.run.directory import RunDirectory
            from matmix.train.run.trained import local_outline

            run, verify = local_outline(self.source, whole=self.verify), find_problem if self.verify else None
            RunDirectory(run).read_config()  # says if this is no run
        listing = list_checkpoints(run / "checkpoints", verify=verify)
        print(render(listing, verified=self.verify).replace(str(run), self.source.rstrip("/")), end="")
        return 1 if listing.damaged else 0


def render(listing: Listing, *, verified: bool) -> str:
    """Writes the listing as text: a table, the checkpoint that a resume would use, and leftovers of saves."""
    lines = ["no checkpoints yet"]
    if listing.checkpoints:
        head = ("step", listing.checkpoints[-1].unit, "size", "engine", "ranks", "written", "state")
        rows = [head, *(_row(facts, verified) for facts in listing.checkpoints)]
        widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        sides = [f"{side}{width}" for side, width in zip(">>><><<", widths, strict=True)]
        lines = ["  ".join(map(format, row, sides)).rstrip() for row in rows]
        hint = "" if verified else " if its checksums are right (--verify reads them)"
        resumed = listing.resumed and f"a resume would use {listing.resumed.path.name}{hint}"
        lines += ["", resumed or "a resume would stop: none of them is valid"]
    cut = "a save or removal that is under way or was cut off; the next save clears it away"
    lines += [f"leftover: {name} ({cut})" for name in listing.leftovers]
    return "".join(f"{line}\n" for line in lines)


def _row(facts: CheckpointFacts, verified: bool) -> tuple[str, ...]:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.written)) if facts.written else "?"
    tokens = "?" if facts.tokens is None else f"{facts.tokens:,}"
    state = "valid, checksums read" if verified else "valid, sizes checked"
    if facts.problem is not None:
        state = facts.problem.removeprefix(f"checkpoint {facts.path} ")
    wrote = facts.engine or "?", str(facts.ranks or "?")
    return f"{facts.step:,}", tokens, format_size(facts.size), *wrote, written, state


def format_size(size: float) -> str:
    """Bytes for people: 999 B, 1.5 kB, 12.3 GB."""
    if size < 1000:
        return f"{size:.0f} B"
    power = min((len(f"{size:.0f}") - 1) // 3, 4)
    return f"{size / 1000**power:.1f} {'kMGT'[power - 1]}B"


_WIDTH = 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipes:
    """List the recipes that come with matmix, with a line on each; or print one, to start one of your own from.

    `matmix recipes NAME > mine.toml` writes one, and `matmix train mine.toml` trains it.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = ""
    """Recipe to print; none: list all."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        print(find_recipe(self.name).read_text() if self.name else listed(), end="")
        return 0


def grouped() -> dict[str, dict[str, Path]]:
    """Groups the bundled recipes by the command that takes them: command -> name -> path."""
    groups = {"matmix train NAME": {}, "matmix compare NAME": bundled_comparisons(), "matmix finetune RUN NAME": {}}
    for name, path in bundled_recipes().items():
        fine_tunes = path.stem.startswith("finetune") or path.parent.name in ("finetuning", "glue")
        groups["matmix finetune RUN NAME" if fine_tunes else "matmix train NAME"][name] = path
    return groups


def listed() -> str:
    """Lists all recipes by the verb that takes them, a line each."""
    lines = []
    for command, recipes in grouped().items():
        width = max(map(len, recipes)) + 4
        lines.append(f"{command}\n")
        for name, path in recipes.items():
            lines.append(f"  {name:{width - 2}}{textwrap.shorten(about(path), _WIDTH - width, placeholder=' ...')}")
        lines.append("")
    return "\n".join([*lines, "matmix recipes NAME prints one.", ""])


def about(path: Path) -> str:
    """Returns the first sentence of the comment that a recipe begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return " ".join(line.lstrip("# ") for line in lines).split(". ")[0].rstrip(".")
