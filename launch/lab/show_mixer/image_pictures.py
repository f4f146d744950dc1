"""Draws what one position takes from a picture: the picture, the orders in which it is read, a heat map a head."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from matmix.launch.lab.show_mixer.fonts import Fonts, wrapped
from matmix.launch.lab.show_mixer.pictures import (
    DPI,
    INK,
    PALE,
    POSITIVE,
    ROBUST,
    SIGNED,
    UNSEEN,
    colour_range,
    draw_colour_keys,
    save_page,
)

_CHOSEN = "#00b3a4"
"""The outline of the chosen patch."""
_SIDE, _GAP, _ABOVE, _MARGIN = 2.7, 0.25, 0.52, 0.35  # of panels, inches
_EXPLAINED = (
    "A head's panel holds the weights with which the patches enter the output of the chosen position: its row of M. "
    "Grey is where the mixer never looks. Colours have a range for each head, which ends at the "
    f"{ROBUST:.1%} quantile of |M| over the other patches, without zeros; own is the weight of the chosen patch for "
    "itself, class that of the class token. Distance: the mean over the other patches, weighted by |M|, of how far "
    "away they are, in patches."
)


@dataclasses.dataclass(frozen=True, slots=True)
class PatchHead:
    """The row of one matrix, and what is said about it."""

    name: str
    weights: np.ndarray
    """(rows, columns): what the chosen position takes of each patch."""
    class_weight: float | None
    """What it takes of the class token; None where there is none."""
    place: tuple[int, int] | None
    """Row and column of the chosen patch; None for the class token."""

    @property
    def own(self) -> np.ndarray:
        """(rows, columns): whether a patch is the chosen one."""
        own = np.zeros(self.weights.shape, dtype=bool)
        if self.place is not None:
            own[self.place] = True
        return own

    @property
    def signed(self) -> bool:
        return bool((self.weights < 0).any())

    @property
    def distance(self) -> float | None:
        """The mean distance of the other patches in patches, weighted by |M|; None from the class token, and where
        nothing is taken of them."""
        sizes = np.abs(self.weights) * ~self.own
        if self.place is None or not sizes.any():
            return None
        rows, columns = np.indices(sizes.shape)
        away = np.hypot(rows - self.place[0], columns - self.place[1])
        return float((sizes * away).sum() / sizes.sum())


@dataclasses.dataclass(frozen=True, slots=True)
class ReadingOrder:
    """One of the orders in which the patches are read."""

    name: str
    places: np.ndarray
    """int64 (patches,): their numbers, row by row, in this order"""


@dataclasses.dataclass(frozen=True, slots=True)
class PatchPage:
    """All that is on a picture."""

    title: str
    subtitle: str
    notes: list[str]
    picture: np.ndarray
    """(height, width, 3), from 0 to 1"""
    orders: list[ReadingOrder]
    heads: list[PatchHead]
    description: str = ""
    """What the page was made from, kept in the file; a page made from something else is not replaced."""


def draw_patch_page(page: PatchPage, path: Path) -> Path:
    """Write a page as a PNG; the path, as `draw_page` describes."""
    import matplotlib as mpl  # only who draws needs it
    from matplotlib.figure import Figure

    first = 1 + len(page.orders)
    columns = max(first, min(len(page.heads), 4), 2)
    width = 2 * _MARGIN + columns * (_SIDE + _GAP) - _GAP
    letters = int(columns * _SIDE / 0.055)  # that fit into a line of small text
    fonts = Fonts.for_texts([page.subtitle, *page.notes])
    notes = [line for note in page.notes for line in wrapped(fonts.drawable(note), letters)]
    footer = textwrap.wrap(_EXPLAINED, letters)
    top = _MARGIN + 0.62 + 0.17 * len(notes)
    rows = 1 + -(-len(page.heads) // columns)
    height = top + rows * (_ABOVE + _SIDE) + 1.0 + 0.15 * len(footer)
    style = {"font.family": fonts.families, "axes.edgecolor": PALE, "axes.linewidth": 0.6, "text.parse_math": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")

        def panel(row: int, column: int, name: str, words: str) -> Any:
            x, y = _MARGIN + column * (_SIDE + _GAP), height - top - (row + 1) * (_ABOVE + _SIDE)
            axes = figure.add_axes((x / width, y / height, _SIDE / width, _SIDE / height))
            axes.set_xticks([])
            axes.set_yticks([])
            place = {"xy": (0, 1), "xycoords": "axes fraction", "textcoords": "offset points"}
            axes.annotate(name, xytext=(0, 17), fontsize=9.5, fontweight="bold", color=INK, **place)
            axes.annotate(words, xytext=(0, 5), fontsize=8, color=PALE, **place)
            return axes

        head = page.heads[0]
        grid = head.weights.shape
        where = "the class token is chosen" if head.place is None else f"chosen: row {head.place[0]}, column "
        where += "" if head.place is None else str(head.place[1])
        axes = panel(0, 0, f"{grid[0]} x {grid[1]} patches", where)
        axes.imshow(page.picture, extent=_extent(grid), interpolation="nearest")
        _outline(axes, head.place)
        for number, order in enumerate(page.orders, 1):
            _draw_order(panel(0, number, order.name, "from dark to light"), page.picture, order, grid, head.place)
        for number, head in enumerate(page.heads):
            row, column = divmod(number, columns)
            _draw_head(panel(1 + row, column, head.name, _head_words(head)), page.picture, head)
        x, y = _MARGIN / width, 1 - _MARGIN / height
        figure.text(x, y, page.title, fontsize=15, fontweight="bold", color=INK, va="top")
        figure.text(x, y - 0.32 / height, fonts.drawable(page.subtitle), fontsize=9.5, color=PALE, va="top")
        figure.text(x, y - 0.54 / height, "\n".join(notes), fontsize=8, color=INK, va="top", linespacing=1.35)
        signs = {head.signed for head in page.heads}
        draw_colour_keys(figure, signs, (width, height), _MARGIN, _MARGIN + 0.15 * len(footer) + 0.3)
        place = x, _MARGIN / height
        figure.text(*place, "\n".join(footer), fontsize=7, color=PALE, va="bottom", linespacing=1.35)
        return save_page(figure, path, page.description)


def _extent(grid: tuple[int, int]) -> tuple[float, float, float, float]:
    """Axes count patches, whatever the size of the picture."""
    return -0.5, grid[1] - 0.5, grid[0] - 0.5, -0.5


def _outline(axes: Any, place: tuple[int, int] | None) -> None:
    from matplotlib.patches import Rectangle

    if place is not None:
        corner = place[1] - 0.5, place[0] - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=_CHOSEN, linewidth=1.8, zorder=3))


def _faint(picture: np.ndarray) -> np.ndarray:
    """The picture's brightness, (height, width, 1), close to white: it does not hide what is on it."""
    grey = picture @ np.array([0.299, 0.587, 0.114])
    return 0.8 + 0.2 * grey[..., None]


def _draw_order(
    axes: Any, picture: np.ndarray, order: ReadingOrder, grid: tuple[int, int], place: tuple[int, int] | None
) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    axes.imshow(np.repeat(_faint(picture), 3, 2), extent=_extent(grid), interpolation="nearest")
    points = np.stack((order.places % grid[1], order.places // grid[1]), 1)
    segments = np.stack((points[:-1], points[1:]), 1)
    colours = colormaps["viridis"](np.linspace(0, 1, max(len(segments), 1)))
    axes.add_collection(LineCollection(segments, colors=colours, linewidths=1.3))
    axes.plot(*points[0], "o", color=colours[0], markersize=4)
    _outline(axes, place)


def _draw_head(axes: Any, picture: np.ndarray, head: PatchHead) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize, to_rgb

    low, high, _ = colour_range(head.weights, head.own)
    heat = colormaps[SIGNED if head.signed else POSITIVE](Normalize(low, high, clip=True)(head.weights))[..., :3]
    heat[head.weights == 0] = to_rgb(UNSEEN)
    down, across = (size // count for size, count in zip(picture.shape[:2], head.weights.shape, strict=True))
    heat = heat.repeat(down, 0).repeat(across, 1)
    axes.imshow(heat * _faint(picture), extent=_extent(head.weights.shape), interpolation="nearest")
    _outline(axes, head.place)


def _head_words(head: PatchHead) -> str:
    low, high, own = colour_range(head.weights, head.own)
    words = [f"±{high:.2g}" if head.signed else f"{low:.3g} to {high:.3g}"]
    if head.place is not None:
        words.append(f"own {head.weights[head.place]:.2g}" if own else "own 0")
    if head.class_weight is not None:
        words.append(f"class {head.class_weight:.2g}")
    if head.distance is not None:
        words.append(f"distance {head.distance:.1f}")
    return "   ".join(words)
