"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns stand below each other also as plain text."""
    rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
