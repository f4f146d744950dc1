"""Draws what a patch takes from a picture: each head's row of M as a map on the picture, one page a layer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from matmix.launch.lab.show_mixer.matrices import choose_matrices, title_of
from matmix.launch.lab.show_mixer.pictures import POSITIVE, ROBUST, SIGNED, UNSEEN, Fonts, Heat, Page, Sheet
from matmix.launch.lab.show_mixer.subject import Subject
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


Place = tuple[int, int] | None
"""Row and column of the patch that is chosen; None for the class token."""


def chosen_place(patch: str, subject: Subject) -> Place:
    """Returns the patch that "ROW,COLUMN" or "class" names, for "" the one in the middle. Raises ValueError (one line)
    for a patch that the picture does not have."""
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
        size = f"the picture has {side} x {side} patches; rows and columns are 0 to {side - 1}"
        raise ValueError(f"--patch {patch}: {size}")
    return row, column


def reading_orders(subject: Subject) -> dict[str, np.ndarray]:
    """Returns the orders in which the model reads the patches, without the class token, by their names: numbers of
    patches, row by row, int64 (patches,)."""
    image, side = subject.image, subject.side
    orders = scan_orders(image, side, side)
    if orders is None:
        return {_WORDS["row"][0]: np.arange(side * side)}
    named = {}
    for name, places in zip(_WORDS[image.scan], orders.places.numpy(), strict=True):
        if image.class_token != "none":
            place = image.class_place(side * side)
            places = places[places != place]
            places = places - (places > place)
        named[name] = places
    return named


def patch_head(row: torch.Tensor, name: str, place: Place, subject: Subject) -> PatchHead:
    """Returns a row (L,) of M as weights of the patches and of the class token."""
    side, class_weight = subject.side, None
    if subject.image.class_tokens:
        at = subject.image.class_place(side * side)
        class_weight, row = float(row[at]), torch.cat((row[:at], row[at + 1 :]))
    return PatchHead(name, row.view(side, side).numpy(), class_weight, place)


def patch_page(
    subject: Subject, layer: int, matrices: torch.Tensor, max_heads: int, place: Place
) -> tuple[PatchPage, str]:
    """Returns the page of a layer, and what is said about it in a line."""
    if matrices.dim() == 5:  # of an MRU the norms of the blocks
        matrices = torch.linalg.matrix_norm(matrices)
    position = subject.image.class_place(subject.side**2)
    if place is not None:
        number = place[0] * subject.side + place[1]
        position = number + (subject.image.class_token != "none" and number >= position)
    mixer = subject.model.blocks[layer].mixer
    chosen, what = choose_matrices(mixer, matrices, max_heads)
    heads = [patch_head(matrices[index, position], name, place, subject) for index, name in chosen]
    taker = "the class token" if place is None else f"the patch in row {place[0]}, column {place[1]} (from 0)"
    notes = [f"What {taker} takes from {subject.given}", *subject.notes, *mixer_notes(subject, mixer)]
    about = title_of(subject, layer, what, subject.given, place_label(place))
    page = PatchPage(**about, notes=notes, heads=heads, picture=subject.picture, orders=reading_orders(subject))
    return page, f"{what}, {_distances(heads)}"


def place_label(place: Place) -> str:
    return "class" if place is None else f"patch-{place[0]}-{place[1]}"


def mixer_notes(subject: Subject, mixer: Mixer) -> list[str]:
    image = subject.image
    place = image.class_place(subject.side**2)
    inside = image.class_token != "none" and not image.class_outside
    notes = {
        "M is the mean over both orders.": len(_WORDS[image.scan]) > 1,
        "The mixer sees no later patches of the order.": mixer.causal,
        "The class token stands outside of the order, next to every patch.": image.class_outside,
        f"The class token is read as number {place} of the sequence, from 0.": inside,
        "M holds an identity: the mixer adds its own input.": mixer.holds_identity,
        "Weights are the norms of the products of the states between two patches.": mixer.name == "mru",
        "M is the same for every picture.": not mixer.data_dependent,
    }
    return [note for note, holds in notes.items() if holds]


def _distances(heads: Sequence[PatchHead]) -> str:
    """Describes in a line the range of the heads' mean distances, or of the class token's weights for itself."""
    distances = [head.distance for head in heads if head.distance is not None]
    if distances:
        return f"mean distance {min(distances):.1f} to {max(distances):.1f} patches"
    own = [head.class_weight for head in heads if head.class_weight is not None]
    return f"of itself {min(own):.2g} to {max(own):.2g}" if own else "takes nothing"


_CHOSEN = "#00b3a4"
"""The outline of the chosen patch."""
_EXPLAINED = (
    "A head's panel holds the weights with which the patches enter the output of the chosen position: its row of M. "
    "Grey is where the mixer never looks. Colours have a range for each head, which ends at the "
    f"{ROBUST:.1%} quantile of |M| over the other patches, without zeros; own is the weight of the chosen patch for "
    "itself, class that of the class token. Distance: the mean over the other patches, weighted by |M|, of how far "
    "away they are, in patches."
)


@dataclasses.dataclass(frozen=True, slots=True)
class PatchHead(Heat):
    """The row of one matrix: (rows, columns), the weight of each patch in the output of the chosen position."""

    class_weight: float | None
    """The weight of the class token; None where there is none."""
    place: Place

    @property
    def own(self) -> np.ndarray:
        own = np.zeros(self.weights.shape, dtype=bool)
        if self.place is not None:
            own[self.place] = True
        return own

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

    def words(self) -> str:
        _, _, own, span = self.colours()
        words = [span]
        if self.place is not None:
            words.append(f"own {self.weights[self.place]:.2g}" if own else "own 0")
        if self.class_weight is not None:
            words.append(f"class {self.class_weight:.2g}")
        if self.distance is not None:
            words.append(f"distance {self.distance:.1f}")
        return "   ".join(words)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PatchPage(Page):
    """What a position of a picture takes from its patches."""

    picture: np.ndarray
    """(height, width, 3), from 0 to 1"""
    orders: dict[str, np.ndarray]
    """Of `reading_orders`."""

    def draw(self, fonts: Fonts) -> Any:
        from matplotlib.patches import Rectangle

        head = self.heads[0]
        first, grid, place = 1 + len(self.orders), head.weights.shape, head.place
        columns = max(first, min(len(self.heads), 4), 2)
        rows = 1 + -(-len(self.heads) // columns)
        sheet = Sheet(self, fonts, self.notes, _EXPLAINED, (rows, columns), 2.7, gap=0.25)
        # The picture's brightness, (height, width, 1), close to white: it does not hide what is on it.
        faint = 0.8 + 0.2 * (self.picture @ np.array([0.299, 0.587, 0.114]))[..., None]
        chosen = "the class token is chosen" if place is None else f"chosen: row {place[0]}, column {place[1]}"
        panels = [(0, 0, f"{grid[0]} x {grid[1]} patches", chosen, self.picture, None)]
        for number, (name, order) in enumerate(self.orders.items(), 1):
            panels.append((0, number, name, "from dark to light", faint.repeat(3, 2), order))
        for number, head in enumerate(self.heads):
            row, column = divmod(number, columns)
            panels.append((1 + row, column, head.name, head.words(), _heat(head, self.picture.shape) * faint, None))
        for row, column, name, words, shown, order in panels:
            axes = sheet.panel(row, column, name, words)
            axes.set_xticks([])
            axes.set_yticks([])
            # Axes count patches, whatever the size of the picture.
            axes.imshow(shown, extent=(-0.5, grid[1] - 0.5, grid[0] - 0.5, -0.5), interpolation="nearest")
            if order is not None:
                _draw_order(axes, order, grid)
            if place is not None:
                corner = place[1] - 0.5, place[0] - 0.5
                axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=_CHOSEN, linewidth=1.8, zorder=3))
        return sheet.figure


def _draw_order(axes: Any, places: np.ndarray, grid: tuple[int, int]) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    points = np.stack((places % grid[1], places // grid[1]), 1)
    segments = np.stack((points[:-1], points[1:]), 1)
    colours = colormaps["viridis"](np.linspace(0, 1, max(len(segments), 1)))
    axes.add_collection(LineCollection(segments, colors=colours, linewidths=1.3))
    axes.plot(*points[0], "o", color=colours[0], markersize=4)


def _heat(head: PatchHead, size: tuple[int, ...]) -> np.ndarray:
    """Returns the colours of a head's weights, (height, width, 3)."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize, to_rgb

    low, high, *_ = head.colours()
    heat = colormaps[SIGNED if head.signed else POSITIVE](Normalize(low, high, clip=True)(head.weights))[..., :3]
    heat[head.weights == 0] = to_rgb(UNSEEN)
    down, across = (size // count for size, count in zip(size[:2], head.weights.shape, strict=True))
    return heat.repeat(down, 0).repeat(across, 1)
