"""Draws the mixer matrices of a layer as heat maps, all heads on one page."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.storage.files import first_free

_FIRST = "DejaVu Sans"
BOX = "□"
"""In place of a letter that no font has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fonts:
    families: list[str]
    """In the order in which a letter is looked for."""
    lacking: frozenset[str]
    """Letters that none of them has."""

    @classmethod
    def for_texts(cls, texts: Iterable[str]) -> Fonts:
        """Chooses few of the installed fonts: each time the one with most of the letters that are still missing."""
        from matplotlib.font_manager import findfont, fontManager, get_font

        def letters_of(path: str) -> set[str]:
            try:
                font = get_font(path)
            except (OSError, RuntimeError):  # a font of bitmaps, such as emoji in colours, or a file that is gone
                return set()
            return {letter for letter in lacking if font.get_char_index(ord(letter))}

        families, lacking = [_FIRST], {letter for text in texts for letter in text}
        lacking -= letters_of(findfont(_FIRST))
        # The last resort has a picture for every letter, which says no more than a box.
        entries = [e for e in fontManager.ttflist if e.style == "normal" and not e.name.startswith("Last Resort")]
        entries.sort(key=lambda entry: (entry.name, str(entry.weight) != "400", entry.fname))
        candidates = [(entry.name, letters_of(entry.fname)) for entry in entries] if lacking else []
        while candidates:
            name, letters = max(candidates, key=lambda candidate: len(candidate[1] & lacking))
            if not letters & lacking:
                break
            families.append(name)
            lacking -= letters
        return cls(families, frozenset(lacking))

    def drawable(self, text: str) -> str:
        """Returns a text with boxes in place of the letters that no font has."""
        return "".join(BOX if letter in self.lacking else letter for letter in text)


def width_of(text: str) -> int:
    """Returns the width of a text in narrow letters; one of Chinese, Japanese or Korean is as wide as two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def wrapped(text: str, letters: int) -> list[str]:
    """Cuts a text into lines of at most so many narrow letters, if all of the text is as wide as its letters are on
    average."""
    return textwrap.wrap(text, max(1, letters * len(text) // max(1, width_of(text))))


MOST_LABELS = 40
"""Axes name the tokens if there are no more than these."""
MOST_LETTERS = 160
"""Of a longer text the beginning stands on the page."""
ROBUST = 0.995
"""The quantile of the sizes of entries at which colours end: single large ones shall not outshine the rest."""
SIGNED, POSITIVE = "RdBu_r", "magma_r"
UNSEEN, INK, PALE = "#e4e4ea", "#1f1f24", "#686872"
_COLUMNS = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3, 9: 3}  # else 4
DPI = 150
MARGIN, ABOVE = 0.35, 0.52  # of a page, and of a panel for its title; inches
NO_FONT = f"{BOX} stands for a letter that no font installed here has, #N for token N, whose name has such letters."
_EXPLAINED = (
    "Row t holds what output t takes of each input; grey is where a mixer never looks. Colours have a range for each "
    f"head, which ends at the {ROBUST:.1%} quantile of |M| off the diagonal, without zeros; diag is the largest |M| on "
    "the diagonal, where that is more. Rank: singular values of M above ε L times the largest, in float64 (ε 2.2e-16, "
    "L its rows); + I: that of M without the skip, an identity in it. Blocks: ranks of its lower left and upper right "
    "quarter, which the dashed lines bound."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Heat:
    """Weights that are drawn as colours. Its kinds say by `own` which of them are what a position takes of itself:
    these often outshine all others."""

    name: str
    weights: np.ndarray

    @property
    def signed(self) -> bool:
        return bool((self.weights < 0).any())

    def colours(self) -> tuple[float, float, float, str]:
        """Returns the entries at which colours begin and end, found without the own ones, the largest size of these,
        and words for the range."""
        sizes = np.abs(self.weights)
        others, most = sizes[~self.own & (sizes > 0)], float(sizes[self.own].max(initial=0.0))
        low, high = np.quantile(others if others.size else [most or 1.0], (1 - ROBUST, ROBUST)).tolist()
        if self.signed:
            return -high, high, most, f"±{high:.2g}"
        # Weights that are nearly alike, as those of attention without training, differ visibly all the same.
        low = low if high / 2 < low < high * (1 - 1e-6) else 0.0
        return low, high, most, f"{low:.3g} to {high:.3g}"


@dataclasses.dataclass(frozen=True, slots=True)
class Head(Heat):
    """One matrix (n, n), n a multiple of `tokens`; row t holds the weights of output t."""

    tokens: int
    rank: int
    """Rank of M; with a skip, of M without it."""
    skip: bool
    """M is the identity and something else: the mixer adds its own input."""
    below: int
    """Rank of the block that takes the first half of the tokens to the second one."""
    above: int
    """Rank of the block that takes the second half to the first one."""

    @property
    def later(self) -> np.ndarray:
        """(n, n): whether an entry belongs to an input after its output."""
        token = np.arange(len(self.weights)) * self.tokens // len(self.weights)
        return token[None, :] > token[:, None]

    @property
    def own(self) -> np.ndarray:
        return ~(self.later | self.later.T)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All that is on a picture. Its kinds return the figure from `draw(fonts)`."""

    title: str = ""
    subtitle: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    heads: list[Any] = dataclasses.field(default_factory=list)
    """Each a `Heat`."""
    description: str = ""
    """The source of the page, kept in the file; a page with another source is not replaced."""

    def words(self) -> list[str]:
        return self.notes

    def fonts(self) -> Fonts:
        return Fonts.for_texts([self.subtitle, *self.words(), *map(_readable, getattr(self, "pieces", ()))])

    def save(self, path: Path) -> Path:
        """Writes a PNG, and makes the folder. Returns the path, or that with -2, -3 ... at the end of its name where
        other pages are in the way; the same page, made again, replaces itself."""
        import matplotlib as mpl  # only who draws needs it

        fonts = self.fonts()
        style = {"font.family": fonts.families, "axes.edgecolor": PALE, "axes.linewidth": 0.6}
        with mpl.rc_context({**style, "text.parse_math": False}):  # a $ in a text is a $
            figure = self.draw(fonts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path = first_free(path, self._in_the_way)
            figure.savefig(path, format="png", metadata={"Software": "matmix", "Description": self.description})
        return path

    def _in_the_way(self, path: Path) -> bool:
        from PIL import Image

        if not path.exists():
            return False
        with contextlib.suppress(OSError), Image.open(path) as image:
            return image.info.get("Description") != self.description
        return True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPage(Page):
    """Matrices that mix the tokens of a text."""

    text: str = ""
    """The text that the model read."""
    pieces: Sequence[str] = ()
    """Names of the tokens."""
    ids: Sequence[int] = ()
    """And their numbers, which stand for the names that no font here can write."""

    def words(self) -> list[str]:
        return [f"Text: {_begin(' '.join(self.text.split()), MOST_LETTERS)}", *self.notes]

    def labels(self, fonts: Fonts) -> list[str]:
        """Returns the names of the tokens on the axes; `#` and its number for one that no font has."""
        pairs = zip(map(_readable, self.pieces), self.ids, strict=True)
        return [f"#{index}" if fonts.lacking.intersection(name) else name for name, index in pairs]

    def draw(self, fonts: Fonts) -> Any:
        labels, columns = self.labels(fonts), _COLUMNS.get(len(self.heads), 4)
        side = {1: 5.2, 2: 4.2, 3: 3.4}.get(columns, 2.7)  # of a panel
        left, below = 0.5, 0.25
        if named := len(labels) <= MOST_LABELS:  # else axes are numbered
            side = max(side, 0.13 * len(labels))
            below = 0.12 + 0.066 * max(map(width_of, labels))
            left = below + 0.2
        notes = [*self.words(), *([NO_FONT] if fonts.lacking else [])]
        rows = -(-len(self.heads) // columns)
        sheet = Sheet(self, fonts, notes, _EXPLAINED, (rows, columns), side, gap=0.22, left=left, below=0.05 + below)
        for number, head in enumerate(self.heads):
            _, high, diagonal, span = head.colours()
            words = f"rank {head.rank}{' + I' if head.skip else ''}   blocks {head.below} / {head.above}   {span}"
            words += f"   diag {diagonal:.2g}" if diagonal > 1.05 * high else ""
            axes = sheet.panel(*divmod(number, columns), head.name, words)
            edges = number % columns == 0, number + columns >= len(self.heads)
            _draw_head(axes, head, labels if named else None, *edges)
        return sheet.figure


class Sheet:
    """A figure with title, subtitle and notes above its panels, and the keys of their colours and a footer below."""

    def __init__(
        self, page: Page, fonts: Fonts, notes: Sequence[str], explained: str, grid: tuple[int, int], side: float, *,
        gap: float, left: float = 0.0, below: float = 0.0,
    ) -> None:  # fmt: skip
        """grid: rows and columns of panels; sizes in inches: side of a panel, gap between them, and what their labels
        take to the left of all panels and below them."""
        from matplotlib.figure import Figure

        letters = max(40, int(grid[1] * side / 0.055))  # that fit into a line of small text
        notes = [line for note in notes for line in wrapped(fonts.drawable(note), letters)]
        footer = textwrap.wrap(explained, letters)
        self.side, self.gap, self.left = side, gap, MARGIN + left
        self.top = MARGIN + 0.62 + 0.17 * len(notes)
        self.width = self.left + grid[1] * (side + gap) + MARGIN - gap
        self.height = self.top + grid[0] * (ABOVE + side) + below + 1.0 + 0.15 * len(footer)
        self.figure = Figure(figsize=(self.width, self.height), dpi=DPI, facecolor="white")
        x, y, write = MARGIN / self.width, 1 - MARGIN / self.height, self.figure.text
        write(x, y, page.title, fontsize=15, fontweight="bold", color=INK, va="top")
        write(x, y - 0.32 / self.height, fonts.drawable(page.subtitle), fontsize=9.5, color=PALE, va="top")
        write(x, y - 0.54 / self.height, "\n".join(notes), fontsize=8, color=INK, va="top", linespacing=1.35)
        small = {"fontsize": 7, "color": PALE, "va": "bottom", "linespacing": 1.35}
        write(x, MARGIN / self.height, "\n".join(footer), **small)
        signs, place = {head.signed for head in page.heads}, MARGIN
        for signed, colours, ticks in ((True, SIGNED, ["−", "0", "+"]), (False, POSITIVE, ["least", "most"])):
            if signed in signs:
                axes = self.axes(place, MARGIN + 0.15 * len(footer) + 0.3, 1.5, 0.11)
                axes.imshow(np.linspace(0, 1, 256)[None], cmap=colours, aspect="auto", extent=(0, 1, 0, 1))
                axes.set_yticks([])
                axes.set_xticks(np.linspace(0, 1, len(ticks)), ticks)
                for tick, end in ((0, "left"), (-1, "right")):
                    axes.get_xticklabels()[tick].set_ha(end)
                axes.tick_params(length=2, width=0.5, color=PALE, labelcolor=PALE, labelsize=7, pad=2)
                place += 1.9

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        sizes = x / self.width, y / self.height, width / self.width, height / self.height
        return self.figure.add_axes(sizes)

    def panel(self, row: int, column: int, name: str, words: str) -> Any:
        """Returns the axes of a panel, with its title above them."""
        x = self.left + column * (self.side + self.gap)
        axes = self.axes(x, self.height - self.top - (row + 1) * (ABOVE + self.side), self.side, self.side)
        place = {"xy": (0, 1), "xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(name, xytext=(0, 17), fontsize=9.5, fontweight="bold", color=INK, **place)
        axes.annotate(words, xytext=(0, 5), fontsize=8, color=PALE, **place)
        return axes


def _begin(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _draw_head(axes: Any, head: Head, labels: list[str] | None, left: bool, lowest: bool) -> None:
    """left, lowest: whether the panel is at an edge, where axes have names."""
    from matplotlib import colormaps

    low, high, *_ = head.colours()
    colours = colormaps[SIGNED if head.signed else POSITIVE].with_extremes(bad=UNSEEN)
    extent = (-0.5, head.tokens - 0.5, head.tokens - 0.5, -0.5)  # whatever the size of the matrix, axes count tokens
    empty = [half for half in (head.later, head.later.T) if not head.weights[half].any()]  # zero by its form
    shown = np.ma.array(head.weights, mask=np.any([np.zeros_like(head.later), *empty], axis=0))
    axes.imshow(shown, cmap=colours, vmin=low, vmax=high, extent=extent)
    for line in (axes.axvline, axes.axhline):
        line(head.tokens // 2 - 0.5, color=INK, linewidth=0.6, alpha=0.35, dashes=(4, 4))
    axes.tick_params(length=2, width=0.5, color=PALE, labelcolor=INK, labelsize=6.5, pad=2)
    axes.tick_params(labelleft=left, labelbottom=lowest)
    if labels is not None:
        axes.set_yticks(range(len(labels)), labels)
        axes.set_xticks(range(len(labels)), labels, rotation=90)
    small = {"fontsize": 8, "color": PALE, "labelpad": 3}
    axes.set_ylabel("output" if left else "", **small)
    axes.set_xlabel("input" if lowest else "", **small)


def _readable(piece: str) -> str:
    # What byte-level tokenizers call a space and a line break, and sentencepiece a byte.
    name = piece.translate(str.maketrans("ĠĊ", "▁\n"))
    name = re.sub(r"^<0x([2-7].)>$", lambda code: chr(int(code[1], 16)), name)
    name = name.translate(str.maketrans({"\n": "\\n", "\t": "\\t", " ": "▁"}))
    return _begin(name, 14)
