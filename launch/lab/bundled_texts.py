"""Labelled texts from the corpora that come with matmix, so that fine-tuning can be tried without fetching anything."""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from matmix.data.corpora import bundled_path

Example = dict[str, Any]
EXAMPLES, TESTED = 3000, 1000
"""Of each task, and how many of them are test examples."""
_WORDS = range(12, 41)
"""Words of a text."""
_GENRES = {
    "comedy": "AS YOU LIKE IT|COMEDY OF ERRORS|LABOUR'S LOST|MERCHANT OF VENICE|MERRY WIVES|MIDSUMMER|MUCH ADO|SHREW|"
    "TWELFTH NIGHT|GENTLEMEN OF VERONA|ALL'S WELL",
    "history": "KING HENRY|HENRY THE|KING JOHN|RICHARD",
    "tragedy": "CORIOLANUS|HAMLET|JULIUS CAESAR|LEAR|MACBETH|OTHELLO|ROMEO|TITUS|ANTONY|TIMON",
}
"""Parts of the titles of Shakespeare's plays."""


def authors() -> Iterator[tuple[str, Example]]:
    """Who wrote it, Shakespeare (speeches) or Melville (paragraphs of Moby-Dick)."""
    [whale] = _works("moby_dick")
    yield from _drawn(
        {
            "Melville": [paragraph.splitlines() for paragraph in whale.split("\n\n")],
            "Shakespeare": [speech for work in _works("shakespeare") for speech in _speeches(work)],
        }
    )


def genres() -> Iterator[tuple[str, Example]]:
    """Whether a speech is from a comedy, a history or a tragedy; both splits have speeches of all plays."""
    found: dict[str, list[list[str]]] = {}
    for work in _works("shakespeare"):
        title = work.partition("\n")[0]
        for genre, parts in _GENRES.items():
            if re.search(parts, title):
                found.setdefault(genre, []).extend(_speeches(work))
    yield from _drawn(found)


def verse() -> Iterator[tuple[str, Example]]:
    """Whether a speech is verse, whose lines all begin with a capital, or prose. Lines are joined: what is left of them
    are capitals inside of sentences."""
    found: dict[str, list[list[str]]] = {"verse": [], "prose": []}
    for work in _works("shakespeare"):
        for lines in _speeches(work):
            capitals = [line.lstrip("'\"([")[:1].isupper() for line in lines[1:]]
            if len(capitals) > 1 and (all(capitals) or not any(capitals[:-1])):
                found["verse" if all(capitals) else "prose"].append(lines)
    yield from _drawn(found)


def marks() -> Iterator[tuple[str, Example]]:
    """Whether a sentence of a speech, without its last mark, is a question, an exclamation or a statement."""
    names = {"?": "question", "!": "exclamation", ".": "statement"}
    found: dict[str, list[list[str]]] = {name: [] for name in names.values()}
    for work in _works("shakespeare"):
        for lines in _speeches(work):
            for sentence, mark in re.findall(r"([^.?!]+)([.?!])", " ".join(lines)):
                found[names[mark]].append([sentence.strip(" '-")])
    yield from _drawn(found, range(6, 31))


BUNDLED: dict[str, Callable[[], Iterator[tuple[str, Example]]]] = {
    "authors": authors,
    "genres": genres,
    "verse": verse,
    "marks": marks,
}


def _works(corpus: str) -> list[str]:
    with lzma.open(bundled_path(corpus), "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def _speeches(work: str) -> Iterator[list[str]]:
    """The lines of each speech of a play, without the name of the speaker and stage directions."""
    for block in work.split("\n\n"):
        speaker, *lines = block.strip().splitlines() or [""]
        if re.fullmatch(r"[A-Z][\w. ]{1,24}\.", speaker) and lines:
            yield re.sub(r"\[.*?\]", "", "\n".join(lines), flags=re.DOTALL).splitlines()


def _drawn(by_label: dict[str, list[list[str]]], lengths: range = _WORDS) -> Iterator[tuple[str, Example]]:
    """As many texts of each label, in an order at random; none occurs twice. lengths: in words; what is longer is cut
    off."""
    draw, examples = random.Random(0), []
    for label, found in sorted(by_label.items()):
        words = [" ".join(lines).split() for lines in found]
        texts = sorted({" ".join(one[: lengths.stop - 1]) for one in words if len(one) >= lengths.start})
        examples += [{"text": text, "label": label} for text in draw.sample(texts, EXAMPLES // len(by_label))]
    draw.shuffle(examples)
    for number, example in enumerate(examples):
        yield "test" if number < TESTED else "train", example
