"""Draws what a patch takes from a picture: each head's row of M as a map on the picture, one page a layer."""

from __future__ import annotations

import copy
import dataclasses
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from matmix.launch.lab.show_mixer.matrices import choose_heads, is_per_channel
from matmix.launch.lab.show_mixer.pictures import (
    DPI,
    INK,
    MARGIN,
    PALE,
    POSITIVE,
    ROBUST,
    SIGNED,
    UNSEEN,
    Fonts,
    colour_range,
    save_page,
    wrapped,
    write_words,
)
from matmix.launch.lab.show_mixer.subject import ImageSubject
from matmix.model.backbone import Backbone
from matmix.model.images.scans import scan_orders
from matmix.model.mixers.base import Mixer

_WORDS = {
    "row": ("row by row",),
    "column": ("column by column",),
    "both": ("row by row", "column by column"),
    "snake": ("rows, in a snake", "columns, in a snake"),
    "hilbert": ("along a Hilbert curve",),
}
"""`model.image.scan` -> what its orders are called."""


def chosen_place(patch: str, subject: ImageSubject) -> tuple[int, int] | None:
    """Returns row and column of the patch that "ROW,COLUMN" names, for "" of the one in the middle; None for "class",
    the class token. Raises ValueError (one line) for a patch that the picture does not have."""
    side = subject.side
    if patch == "":
        return side // 2, side // 2
    if patch == "class":
        if subject.image.class_token == "none":
            raise ValueError(f"--patch class: {subject.name} has no class token; name a patch, ROW,COLUMN")
        return None
    match = re.fullmatch(r"\s*(\d{1,6})\s*,\s*(\d{1,6})\s*", patch)
    if not match:
        raise ValueError(f'--patch {patch}: give ROW,COLUMN, such as 0,3, or "class" for the class token')
    row, column = int(match[1]), int(match[2])
    if max(row, column) >= side:
        raise ValueError(
            f"--patch {patch}: the picture has {side} x {side} patches; rows and columns are 0 to {side - 1}"
        )
    return row, column


@torch.no_grad()
def image_matrices(model: Backbone, images: torch.Tensor, layers: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields each layer's number and M (H, L, L) in float64, rows and columns as positions stand in the picture; the
    mean of several orders; the norms of the blocks of an MRU. images: (1, channels, height, width).

    Raises ValueError where M is not finite.
    """
    streams: list[torch.Tensor] = []
    model.stream(images, streams)
    patch = model.config.image.patch
    orders = scan_orders(model.config.image, images.shape[2] // patch, images.shape[3] // patch, images.device)
    for layer in layers:
        block = model.blocks[layer]
        x = block.norm_mixer(streams[layer]) if block.pre else streams[layer]
        mixer = copy.deepcopy(block.mixer).double()
        matrix = mixer.matrix(x.double()) if orders is None else mixer.matrix_in_orders(x.double(), orders)
        if not matrix.isfinite().all():
            raise ValueError(f"M of layer {layer} ({mixer.name}) is not finite: the weights have diverged")
        yield layer, torch.linalg.matrix_norm(matrix[0]) if matrix.dim() == 6 else matrix[0]


def reading_orders(subject: ImageSubject) -> list[ReadingOrder]:
    """Returns the orders in which the model reads the patches, without the class token."""
    image, side = subject.image, subject.side
    orders = scan_orders(image, side, side)
    if orders is None:
        return [ReadingOrder(_WORDS["row"][0], torch.arange(side * side).numpy())]
    named = []
    for name, places in zip(_WORDS[image.scan], orders.places, strict=True):
        if image.class_token != "none":
            place = image.class_place(side * side)
            places = places[places != place]
            places = places - (places > place).long()
        named.append(ReadingOrder(name, places.numpy()))
    return named


def patch_head(row: torch.Tensor, name: str, place: tuple[int, int] | None, subject: ImageSubject) -> PatchHead:
    """Returns a row (L,) of M as weights of the patches and of the class token."""
    side, token = subject.side, subject.image.class_tokens
    class_weight = None
    if token:
        at = subject.image.class_place(side * side)
        class_weight, row = float(row[at]), torch.cat((row[:at], row[at + 1 :]))
    return PatchHead(name, row.view(side, side).numpy(), class_weight, place)


def draw_image_pages(
    subject: ImageSubject, layers: Sequence[int], place: tuple[int, int] | None, folder: Path, max_heads: int
) -> Iterator[tuple[Path, str]]:
    """Draws a page for each of the layers; gives its path and what is said about it in a line. place: of
    `chosen_place`."""
    side, orders = subject.side, reading_orders(subject)
    position = subject.image.class_place(side * side)
    if place is not None:
        number = place[0] * side + place[1]
        position = number + (subject.image.class_token != "none" and number >= position)
    named = "class" if place is None else f"patch-{place[0]}-{place[1]}"
    what = "the class token" if place is None else f"the patch in row {place[0]}, column {place[1]} (from 0)"
    for layer, matrices in image_matrices(subject.model, subject.images, layers):
        mixer, count = subject.model.blocks[layer].mixer, len(matrices)
        chosen = choose_heads(matrices, max_heads, "channel" if is_per_channel(mixer, matrices) else "head")
        heads = [patch_head(matrices[index, position], name, place, subject) for index, name in chosen]
        drawn = f"{count} {'matrix' if count == 1 else 'matrices'}"
        if len(heads) < count:
            drawn = f"{len(heads)} of {drawn}"
        title = f"layer {layer}: {mixer.name}"
        subtitle = f"{subject.where}, {subject.state}, {drawn}"
        notes = [f"What {what} takes from {subject.file}", *subject.notes, *mixer_notes(subject, mixer)]
        description = "\n".join((title, subtitle, *subject.overrides, subject.file, named))
        page = PatchPage(title, subtitle, notes, subject.picture, orders, heads, description)
        path = draw_patch_page(page, folder / f"layer-{layer:02}-{mixer.name}-{subject.label}-{named}.png")
        yield path, f"{drawn}, {_distances(heads)}"


def mixer_notes(subject: ImageSubject, mixer: Mixer) -> list[str]:
    """Returns notes that explain the page of a layer with this mixer."""
    image, notes = subject.image, []
    if len(_WORDS[image.scan]) > 1:
        notes.append("M is the mean over both orders.")
    if mixer.causal:
        notes.append("The mixer sees no later patches of the order.")
    if image.class_outside:
        notes.append("The class token stands outside of the order, next to every patch.")
    elif image.class_token != "none":
        place = image.class_place(subject.side**2)
        notes.append(f"The class token is read as number {place} of the sequence, from 0.")
    if getattr(mixer, "skip", False):
        notes.append("M holds an identity: the mixer adds its own input.")
    if mixer.name == "mru":
        notes.append("Weights are the norms of the products of the states between two patches.")
    if not mixer.data_dependent:
        notes.append("M is the same for every picture.")
    return notes


def _distances(heads: Sequence[PatchHead]) -> str:
    """Describes in a line the range of the heads' mean distances, or of the class token's weights for itself."""
    distances = [head.distance for head in heads if head.distance is not None]
    if distances:
        return f"mean distance {min(distances):.1f} to {max(distances):.1f} patches"
    own = [head.class_weight for head in heads if head.class_weight is not None]
    return f"of itself {min(own):.2g} to {max(own):.2g}" if own else "takes nothing"


_CHOSEN = "#00b3a4"
"""The outline of the chosen patch."""
_SIDE, _GAP, _ABOVE = 2.7, 0.25, 0.52  # of panels, inches
_EXPLAINED = (
    "A head's panel holds the weights with which the patches enter the output of the chosen position: its row of M. "
    "Grey is where the mixer never looks. Colours have a range for each head, which ends at the "
    f"{ROBUST:.1%} quantile of |M| over the other patches, without zeros; own is the weight of the chosen patch for "
    "itself, class that of the class token. Distance: the mean over the other patches, weighted by |M|, of how far "
    "away they are, in patches."
)


@dataclasses.dataclass(frozen=True, slots=True)
class PatchHead:
    """The row of one matrix, and words about it."""

    name: str
    weights: np.ndarray
    """(rows, columns): the weight of each patch in the output of the chosen position."""
    class_weight: float | None
    """The weight of the class token; None where there is none."""
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
    """The source of the page, kept in the file; a page with another source is not replaced."""


def draw_patch_page(page: PatchPage, path: Path) -> Path:
    """Writes a page as a PNG and returns its path, as `draw_page` does."""
    import matplotlib as mpl  # only who draws needs it
    from matplotlib.figure import Figure

    first = 1 + len(page.orders)
    columns = max(first, min(len(page.heads), 4), 2)
    width = 2 * MARGIN + columns * (_SIDE + _GAP) - _GAP
    letters = int(columns * _SIDE / 0.055)  # that fit into a line of small text
    fonts = Fonts.for_texts([page.subtitle, *page.notes])
    notes = [line for note in page.notes for line in wrapped(fonts.drawable(note), letters)]
    footer = textwrap.wrap(_EXPLAINED, letters)
    top = MARGIN + 0.62 + 0.17 * len(notes)
    rows = 1 + -(-len(page.heads) // columns)
    height = top + rows * (_ABOVE + _SIDE) + 1.0 + 0.15 * len(footer)
    style = {"font.family": fonts.families, "axes.edgecolor": PALE, "axes.linewidth": 0.6, "text.parse_math": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")

        def panel(row: int, column: int, name: str, words: str) -> Any:
            x, y = MARGIN + column * (_SIDE + _GAP), height - top - (row + 1) * (_ABOVE + _SIDE)
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
        write_words(figure, page, notes, footer, fonts)
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
    """Returns the picture's brightness, (height, width, 1), close to white: it does not hide what is on it."""
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
