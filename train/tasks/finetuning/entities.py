"""Precision, recall and F1 of entities that tags of words spell, as the package seqeval defines them (after
conlleval.pl of the CoNLL shared tasks). Tags are O, or B, I, E or S, a hyphen and a type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Entity = tuple[str, int, int]
"""Type, first word, last word."""


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence in seqeval's default mode: I after another type, or after O, begins one, too."""
    found, first, before, kind_before = [], 0, "O", ""
    for index, tag in enumerate([*tags, "O"]):
        letter, kind = tag[:1], tag[1:].split("-", 1)[-1] or "_"
        changed = kind != kind_before
        if _ends(before, letter) or (before != "O" and changed):
            found.append((kind_before, first, index - 1))
        if _begins(before, letter) or (letter != "O" and changed):
            first = index
        before, kind_before = letter, kind
    return found


def _ends(before: str, letter: str) -> bool:
    return before in ("E", "S") or (before in ("B", "I") and letter in ("B", "S", "O"))


def _begins(before: str, letter: str) -> bool:
    return letter in ("B", "S") or (letter in ("E", "I") and before in ("E", "S", "O"))


def strict_entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence in seqeval's strict mode with IOB2: B, and the I of the same type that follow it."""
    found: list[Entity] = []
    for index, tag in enumerate(tags):
        letter, _, kind = tag.partition("-")
        if letter == "B":
            found.append((kind, index, index))
        elif letter == "I" and found and found[-1][0] == kind and found[-1][2] == index - 1:
            found[-1] = (kind, found[-1][1], index)
    return found


def entity_scores(
    labels: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]], *, strict: bool = False
) -> dict[str, float]:
    """Over all entities of all sentences; 0 where there is none."""
    read = strict_entities if strict else entities
    right = wanted = given = 0
    for true, guess in zip(labels, predicted, strict=True):
        true_ones, guessed = set(read(true)), set(read(guess))
        right, wanted, given = right + len(true_ones & guessed), wanted + len(true_ones), given + len(guessed)
    precision, recall = right / given if given else 0.0, right / wanted if wanted else 0.0
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"entity_f1": f1, "entity_precision": precision, "entity_recall": recall}
