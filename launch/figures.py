"""What the pictures of comparisons, studies and scores have in common: panels beside each other, and their PNG."""

from __future__ import annotations

import io
from typing import Any


def panels(size: tuple[float, float], rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """A figure of this width and height in inches, and its axes with thin grids as an array (rows, columns).

    options: those of matplotlib's `Figure.subplots`.
    """
    from matplotlib.figure import Figure  # only who draws needs it

    figure = Figure(figsize=size, layout="constrained", dpi=110)
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.grid(True, alpha=0.3, linewidth=0.6)
    return figure, grid


def png_of(figure: Any) -> bytes:
    """The figure as the bytes of a PNG."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
