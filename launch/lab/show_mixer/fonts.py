"""The fonts of a page: DejaVu Sans, and beside it those installed here that have the letters which it lacks."""

from __future__ import annotations

import dataclasses
import textwrap
import unicodedata
from collections.abc import Iterable

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
        """The fewest of the installed fonts, as far as trying the best one each time finds them."""
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
                    found = _letters_of(lacking, get_font(entry.fname))
                except (OSError, RuntimeError):  # a font of bitmaps, such as emoji in colours, or a file that is gone
                    continue
                if found:
                    candidates.append((entry.name, found))
        while lacking and candidates:
            name, found = max(candidates, key=lambda candidate: len(candidate[1] & lacking))
            if not found & lacking:
                break
            families.append(name)
            lacking = lacking - found
        return cls(families, frozenset(lacking))

    def drawable(self, text: str) -> str:
        """A text with boxes in place of the letters that no font has."""
        return "".join(BOX if letter in self.lacking else letter for letter in text)

    def can_draw(self, text: str) -> bool:
        return not self.lacking.intersection(text)


def _letters_of(letters: Iterable[str], font: object) -> set[str]:
    return {letter for letter in letters if font.get_char_index(ord(letter))}


def width_of(text: str) -> int:
    """How many narrow letters take the place of a text: those of Chinese, Japanese and Korean take that of two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def wrapped(text: str, letters: int) -> list[str]:
    """Lines of at most so many narrow letters, if all of the text is as wide as its letters are on average."""
    return textwrap.wrap(text, max(1, letters * len(text) // max(1, width_of(text))))
