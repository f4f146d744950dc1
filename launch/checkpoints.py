"""`matmix checkpoints RUN`: what the checkpoints of a run hold, and whether they are whole."""

from __future__ import annotations

import time
from collections.abc import Callable

from matmix.launch.parser import Parser
from matmix.train.checkpoint.listing import CheckpointFacts, Listing, list_checkpoints
from matmix.train.run.directory import RunDirectory
from matmix.train.run.remote import local_outline

_DESCRIPTION = """\
List the checkpoints of a run: step, tokens seen, size, the engine and the number of ranks that wrote it, when, and
whether it is whole. The exit code is 1 if one is damaged, else 0."""

_CONVERT_DESCRIPTION = """\
Make a run that begins with a checkpoint of another one, in a form that every engine reads at any number of ranks:
weights, optimizer moments, step counts, position in the data. `matmix train OTHER_RUN --engine.name ...` goes on."""


def main(arguments: list[str]) -> int:
    """The verb `checkpoints`; returns the exit code. Raises ValueError or FileNotFoundError for a mistake of
    the user's."""
    if arguments and arguments[0] in SUBCOMMANDS:
        return SUBCOMMANDS[arguments[0]](arguments[1:])
    return _list(arguments)


def _list(arguments: list[str]) -> int:
    parser = Parser(prog="matmix checkpoints", description=_DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="run directory, or its URL")
    parser.add_argument(
        "--verify", action="store_true", help="read every file and compare checksums (default: presence and sizes)"
    )
    options = parser.parse_args(arguments)
    run = RunDirectory(local_outline(options.run, whole=options.verify))
    run.read_config()  # says if this is no run
    listing = list_checkpoints(run.checkpoints, verify=options.verify)
    print(render(listing, verified=options.verify).replace(str(run.path), options.run.rstrip("/")), end="")
    return 1 if listing.damaged else 0


def _convert(arguments: list[str]) -> int:
    from matmix.launch.convert import MAX_FILE_BYTES, convert_run

    parser = Parser(prog="matmix checkpoints convert", description=_CONVERT_DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--out", required=True, metavar="OTHER_RUN", help="run to make (must not hold anything else)")
    parser.add_argument("--step", type=int, default=None, help="checkpoint to convert (default: the newest)")
    parser.add_argument(
        "--max-file-bytes", type=int, default=MAX_FILE_BYTES, help="size of a file of tensors (default: 5 GB)"
    )
    options = parser.parse_args(arguments)
    convert_run(options.run, options.out, step=options.step, max_file_bytes=options.max_file_bytes)
    return 0


# Verbs below this one, by name.
SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {"convert": _convert}


def render(listing: Listing, *, verified: bool) -> str:
    """The listing as text: a table, what a resume would use, and what lies about."""
    if not listing.checkpoints:
        lines = ["no checkpoints yet"]
    else:
        lines = _table([_HEAD, *(_row(facts, verified) for facts in listing.checkpoints)])
        lines += ["", _resume(listing, verified)]
    lines += [
        f"leftover: {name} (a save or removal that is under way or was cut off; the next save clears it away)"
        for name in listing.leftovers
    ]
    return "".join(f"{line}\n" for line in lines)


_HEAD = ("step", "tokens", "size", "engine", "ranks", "written", "state")


def _row(facts: CheckpointFacts, verified: bool) -> tuple[str, ...]:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.written)) if facts.written else "?"
    good = "valid, checksums read" if verified else "valid, sizes checked"
    return (
        f"{facts.step:,}",
        "?" if facts.tokens is None else f"{facts.tokens:,}",
        format_size(facts.size),
        facts.engine or "?",
        "?" if facts.ranks is None else str(facts.ranks),
        written,
        good if facts.problem is None else facts.problem.removeprefix(f"checkpoint {facts.path} "),
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns of equal width, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {0, 1, 2, 4}
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _resume(listing: Listing, verified: bool) -> str:
    if listing.resumed is None:
        return "a resume would stop: none of them is valid"
    hint = "" if verified else " if its checksums are right (--verify reads them)"
    return f"a resume would use {listing.resumed.path.name}{hint}"


def format_size(size: float) -> str:
    """Bytes for people: 999 B, 1.5 kB, 12.3 GB."""
    if size < 1000:
        return f"{size:.0f} B"
    power = min((len(f"{size:.0f}") - 1) // 3, 4)
    return f"{size / 1000**power:.1f} {'kMGT'[power - 1]}B"
