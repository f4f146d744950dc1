"""Draws what pictures of comparisons, studies and scores share: panels beside each other, and confusion matrices."""

import io
from collections.abc import Sequence
from typing import Any

MOST_CLASSES = 60
"""The most classes of a confusion matrix that can be read."""


def panels(size: tuple[float, float], rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """Makes a figure of this width and height in inches, and its axes with thin grids as an array (rows, columns).
    options: those of matplotlib's `Figure.subplots`."""
    from matplotlib.figure import Figure  # only who draws needs it

    figure = Figure(figsize=size, layout="constrained", dpi=110)
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.grid(True, alpha=0.3, linewidth=0.6)
    return figure, grid


def png_of(figure: Any) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def confusion_picture(labels: Sequence[int], predicted: Sequence[int], classes: Sequence[str], title: str) -> bytes:
    """Draws how often each class, a row, is taken for each, a column; returns a PNG. labels, predicted: numbers of
    classes."""
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    size = 3.5 + 0.32 * len(classes)
    figure = Figure(figsize=(size, size), layout="constrained", dpi=110)
    axes, look = figure.subplots(), {"xticks_rotation": "vertical", "cmap": "Blues", "colorbar": False}
    names = {"labels": range(len(classes)), "display_labels": classes}
    ConfusionMatrixDisplay.from_predictions(labels, predicted, **names, **look, ax=axes)
    axes.set(title=title, xlabel="predicted", ylabel="label")
    return png_of(figure)
