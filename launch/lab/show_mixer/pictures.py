"""Draws the mixer matrices of a layer as heat maps, all heads on one page."""

from __future__ import annotations

import dataclasses
import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matmix.data.storage.files import first_free

_FIRST = "DejaVu Sans"
BOX = "□"
"""In place of a letter that no font has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fonts:
    """Fonts for some texts."""

    families: list[str]
    """In the order in which a letter is looked for."""
    lacking: frozenset[str]
    """Letters that none of them has."""

    @classmethod
    def for_texts(cls, texts: Iterable[str]) -> Fonts:
        """Chooses few of the installed fonts: each time the one with most of the letters that are still missing."""
        from matplotlib.font_manager import findfont, fontManager, get_font

        wanted = {letter for text in texts for letter in text}
        lacking = wanted - _letters_of(wanted, get_font(findfont(_FIRST)))
        families = [_FIRST]
        candidates = []
        if lacking:
            # The last resort has a picture for every letter, which says no more than a box.
            entries = [e for e in fontManager.ttflist if e.style == "normal" and not e.name.startswith("Last Resort")]
            for entry in sorted(entries, key=lambda entry: (entry.name, str(entry.weight) != "400", entry.fname)):
                try:
                    letters = _letters_of(lacking, get_font(entry.fname))
                except (OSError, RuntimeError):  # a font of bitmaps, such as emoji in colours, or a file that is gone
                    continue
                if letters:
                    candidates.append((entry.name, letters))
        while lacking and candidates:
            name, letters = max(candidates, key=lambda candidate: len(candidate[1] & lacking))
            if not letters & lacking:
                break
            families.append(name)
            lacking = lacking - letters
        return cls(families, frozenset(lacking))

    def drawable(self, text: str) -> str:
        """Returns a text with boxes in place of the letters that no font has."""
        return "".join(BOX if letter in self.lacking else letter for letter in text)

    def can_draw(self, text: str) -> bool:
        return not self.lacking.intersection(text)


def _letters_of(letters: Iterable[str], font: object) -> set[str]:
    return {letter for letter in letters if font.get_char_index(ord(letter))}


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
MARGIN = 0.35  # of a page, inches
NO_FONT = f"{BOX} stands for a letter that no font installed here has, #N for token N, whose name has such letters."
_EXPLAINED = (
    "Row t holds what output t takes of each input; grey is where a mixer never looks. Colours have a range for each "
    f"head, which ends at the {ROBUST:.1%} quantile of |M| off the diagonal, without zeros; diag is the largest |M| on "
    "the diagonal, where that is more. Rank: singular values of M above ε L times the largest, in float64 (ε 2.2e-16, "
    "L its rows); + I: that of M without the skip, an identity in it. Blocks: ranks of its lower left and upper right "
    "quarter, which the dashed lines bound."
)


def colour_range(entries: np.ndarray, own: np.ndarray) -> tuple[float, float, float]:
    """Returns the entries at which colours begin and end, found without those of `own`, of which it gives the largest
    size, too."""
    sizes = np.abs(entries)
    others, most = sizes[~own & (sizes > 0)], float(sizes[own].max(initial=0.0))
    low, high = np.quantile(others if others.size else [most or 1.0], (1 - ROBUST, ROBUST)).tolist()
    if (entries < 0).any():
        return -high, high, most
    # Weights that are nearly alike, as those of attention without training, differ visibly all the same.
    return low if high / 2 < low < high * (1 - 1e-6) else 0.0, high, most


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """One matrix and what is said about it."""

    name: str
    matrix: np.ndarray
    """(n, n), n a multiple of `tokens`; row t holds the weights of output t."""
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
    def signed(self) -> bool:
        return bool((self.matrix < 0).any())

    @property
    def later(self) -> np.ndarray:
        """(n, n): whether an entry belongs to an input after its output."""
        token = np.arange(len(self.matrix)) * self.tokens // len(self.matrix)
        return token[None, :] > token[:, None]

    def colour_range(self) -> tuple[float, float, float]:
        """Returns the entries at which the colours begin and end, and the largest size on the diagonal, which often
        outshines all others: what a token keeps of itself."""
        return colour_range(self.matrix, ~(self.later | self.later.T))


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """All that is on a picture."""

    title: str
    subtitle: str
    text: str
    """The text that the model read."""
    notes: list[str]
    heads: list[Head]
    pieces: list[str]
    """Names of the tokens."""
    ids: list[int]
    """And their numbers, which stand for the names that no font here can write."""
    description: str = ""
    """The source of the page, kept in the file; a page with another source is not replaced."""

    def words(self) -> list[str]:
        """Returns the paragraphs above the panels."""
        return [f"Text: {_begin(' '.join(self.text.split()), MOST_LETTERS)}", *self.notes]

    def fonts(self) -> Fonts:
        """Fonts for all that stands on it."""
        return Fonts.for_texts([self.subtitle, *self.words(), *map(_readable, self.pieces)])

    def labels(self, fonts: Fonts) -> list[str]:
        """Returns the names of the tokens on the axes; `#` and its number for one that no font has."""
        names = map(_readable, self.pieces)
        return [name if fonts.can_draw(name) else f"#{index}" for name, index in zip(names, self.ids, strict=True)]


def _begin(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


class _Layout:
    """Sizes of a page in inches, and the lines of text above and below its panels."""

    gap = 0.22
    above = 0.52  # a panel's title

    def __init__(self, page: Page, labels: list[str], notes: list[str]) -> None:
        self.columns = _COLUMNS.get(len(page.heads), 4)
        self.side = {1: 5.2, 2: 4.2, 3: 3.4}.get(self.columns, 2.7)  # of a panel
        self.named = len(labels) <= MOST_LABELS  # else axes are numbered
        left, below = 0.3, 0.25  # of the panels
        if self.named:
            self.side = max(self.side, 0.13 * len(labels))
            left = below = 0.12 + 0.066 * max(map(width_of, labels))
        letters = max(40, int(self.columns * self.side / 0.055))  # that fit into a line of small text
        self.notes = [line for note in notes for line in wrapped(note, letters)]
        self.footer = textwrap.wrap(_EXPLAINED, letters)
        self.left, self.top = MARGIN + 0.2 + left, MARGIN + 0.62 + 0.17 * len(self.notes)
        rows = -(-len(page.heads) // self.columns)
        self.width = self.left + self.columns * (self.side + self.gap) + MARGIN - self.gap
        panels = rows * (self.above + self.side) + 0.2 + below
        self.height = self.top + panels + 0.85 + 0.15 * len(self.footer)

    def panel(self, number: int) -> tuple[float, float, float, float]:
        """Returns the place of a panel in fractions of the page."""
        row, column = divmod(number, self.columns)
        x = self.left + column * (self.side + self.gap)
        y = self.height - self.top - (row + 1) * (self.above + self.side)
        return x / self.width, y / self.height, self.side / self.width, self.side / self.height


def draw_page(page: Page, path: Path) -> Path:
    """Writes a page as a PNG, and makes the folder.

    Returns: the path, or that with -2, -3 ... at the end of its name where other pages are in the way. The same page,
    made again, replaces itself.
    """
    import matplotlib as mpl  # only who draws needs it
    from matplotlib.figure import Figure

    fonts = page.fonts()
    labels, notes = page.labels(fonts), [fonts.drawable(note) for note in page.words()]
    if fonts.lacking:
        notes.append(NO_FONT)
    layout = _Layout(page, labels, notes)
    style = {"font.family": fonts.families, "axes.edgecolor": PALE, "axes.linewidth": 0.6}
    with mpl.rc_context({**style, "text.parse_math": False}):  # a $ in a text is a $
        figure = Figure(figsize=(layout.width, layout.height), dpi=DPI, facecolor="white")
        for number, head in enumerate(page.heads):
            axes = figure.add_axes(layout.panel(number))
            _draw_head(axes, head)
            lowest = number + layout.columns >= len(page.heads)
            _name_axes(axes, labels, layout.named, number % layout.columns == 0, lowest)
        write_words(figure, page, layout.notes, layout.footer, fonts)
        return save_page(figure, path, page.description)


def save_page(figure: Any, path: Path, description: str) -> Path:
    """Writes a figure as `draw_page` describes; description: what it was made from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = first_free(path, lambda other: other.exists() and _description(other) != description)
    figure.savefig(path, format="png", metadata={"Software": "matmix", "Description": description})
    return path


def _description(path: Path) -> str | None:
    """Returns the description in a PNG; None where there is none."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.info.get("Description")
    except OSError:
        return None


def _draw_head(axes: Any, head: Head) -> None:
    from matplotlib import colormaps

    low, high, diagonal = head.colour_range()
    colours = colormaps[SIGNED if head.signed else POSITIVE].with_extremes(bad=UNSEEN)
    extent = (-0.5, head.tokens - 0.5, head.tokens - 0.5, -0.5)  # whatever the size of the matrix, axes count tokens
    empty = [half for half in (head.later, head.later.T) if not head.matrix[half].any()]  # zero by its form
    shown = np.ma.array(head.matrix, mask=np.any([np.zeros_like(head.later), *empty], axis=0))
    axes.imshow(shown, cmap=colours, vmin=low, vmax=high, extent=extent)
    for line in (axes.axvline, axes.axhline):
        line(head.tokens // 2 - 0.5, color=INK, linewidth=0.6, alpha=0.35, dashes=(4, 4))
    span = f"±{high:.2g}" if head.signed else f"{low:.3g} to {high:.3g}"
    words = f"rank {head.rank}{' + I' if head.skip else ''}   blocks {head.below} / {head.above}   {span}"
    if diagonal > 1.05 * high:
        words += f"   diag {diagonal:.2g}"
    place = {"xy": (0, 1), "xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(head.name, xytext=(0, 17), fontsize=9.5, fontweight="bold", color=INK, **place)
    axes.annotate(words, xytext=(0, 5), fontsize=8, color=PALE, **place)


def _name_axes(axes: Any, labels: list[str], named: bool, left: bool, lowest: bool) -> None:
    axes.tick_params(length=2, width=0.5, color=PALE, labelcolor=INK, labelsize=6.5, pad=2)
    axes.tick_params(labelleft=left, labelbottom=lowest)
    if named:
        axes.set_yticks(range(len(labels)), labels)
        axes.set_xticks(range(len(labels)), labels, rotation=90)
    if left:
        axes.set_ylabel("output", fontsize=8, color=PALE, labelpad=3)
    if lowest:
        axes.set_xlabel("input", fontsize=8, color=PALE, labelpad=3)


def _readable(piece: str) -> str:
    """Returns a token's name on one line."""
    # What byte-level tokenizers call a space and a line break, and sentencepiece a byte.
    name = piece.translate(str.maketrans("ĠĊ", "▁\n"))
    name = re.sub(r"^<0x([2-7].)>$", lambda code: chr(int(code[1], 16)), name)
    name = name.translate(str.maketrans({"\n": "\\n", "\t": "\\t", " ": "▁"}))
    return _begin(name, 14)


def write_words(figure: Any, page: Any, notes: Sequence[str], footer: Sequence[str], fonts: Fonts) -> None:
    """Writes title, subtitle and notes above the panels of a page, and below them the keys of its colours and the
    footer. page: has `title`, `subtitle` and `heads`."""
    width, height = figure.get_size_inches()
    x, y = MARGIN / width, 1 - MARGIN / height
    figure.text(x, y, page.title, fontsize=15, fontweight="bold", color=INK, va="top")
    figure.text(x, y - 0.32 / height, fonts.drawable(page.subtitle), fontsize=9.5, color=PALE, va="top")
    figure.text(x, y - 0.54 / height, "\n".join(notes), fontsize=8, color=INK, va="top", linespacing=1.35)
    signs = {head.signed for head in page.heads}
    _draw_colour_keys(figure, signs, (width, height), MARGIN, MARGIN + 0.15 * len(footer) + 0.3)
    words = {"fontsize": 7, "color": PALE, "va": "bottom", "linespacing": 1.35}
    figure.text(x, MARGIN / height, "\n".join(footer), **words)


def _draw_colour_keys(figure: Any, signs: Collection[bool], size: tuple[float, float], x: float, y: float) -> None:
    """Draws the colours of entries of both signs, where True is in `signs`, and of one sign, where False is.

    size: width and height of the figure; x, y: where they begin. All in inches.
    """
    for signed, colours, ticks in ((True, SIGNED, ["−", "0", "+"]), (False, POSITIVE, ["least", "most"])):
        if signed in signs:
            axes = figure.add_axes((x / size[0], y / size[1], 1.5 / size[0], 0.11 / size[1]))
            axes.imshow(np.linspace(0, 1, 256)[None], cmap=colours, aspect="auto", extent=(0, 1, 0, 1))
            axes.set_yticks([])
            axes.set_xticks(np.linspace(0, 1, len(ticks)), ticks)
            for place, side in ((0, "left"), (-1, "right")):
                axes.get_xticklabels()[place].set_ha(side)
            axes.tick_params(length=2, width=0.5, color=PALE, labelcolor=PALE, labelsize=7, pad=2)
            x += 1.9
