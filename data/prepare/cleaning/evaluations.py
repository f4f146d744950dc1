"""Finds documents that hold texts of an evaluation: those that share a run of 13 words with one, as for GPT-3
(arXiv 2005.14165, appendix C). Shorter runs are common in any text. An example of 8 to 12 words counts as one run, and
a shorter one not at all. GPT-3 cut out the surroundings of a match; here the whole document goes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from matmix.data.prepare.cleaning.words import hashed_words, runs

LONGEST, SHORTEST = 13, 8

Runs = dict[int, np.ndarray]
"""Number of words -> the hashes of runs of so many, uint64 (n,), ascending."""


class Evaluation(Protocol):
    """A file with examples of an evaluation."""

    def texts(self) -> Iterator[str]:
        """Yields its texts. Raises ValueError (one line) for damage."""


def read_evaluations(given: Mapping[str, Sequence[Evaluation]]) -> Runs:
    """Returns the runs of the texts in files; of a text with several lines, each is also an example. given: an argument
    -> its files. Raises ValueError (one line) for one without a run, and as `Evaluation.texts`."""
    found: dict[int, list[np.ndarray]] = {}
    for name, files in given.items():
        count = 0
        for text in itertools.chain.from_iterable(file.texts() for file in files):
            words = hashed_words(text)
            examples = {min(LONGEST, len(words)): [words]}
            if len(words) > LONGEST:
                for line in map(hashed_words, text.splitlines()):
                    examples.setdefault(min(LONGEST, len(line)), []).append(line)
            for length, lists in examples.items():
                if length >= SHORTEST:
                    found.setdefault(length, []).extend(runs(one, length) for one in lists)
                    count += 1
        if not count:
            raise ValueError(f"{name} has no text of {SHORTEST} words or more to look for in the documents")
    return {length: np.unique(np.concatenate(lists)) for length, lists in found.items()}


def is_contaminated(words: np.ndarray, evaluations: Runs) -> bool:
    """Returns whether a text has one of the runs. words: of `hashed_words`, uint64 (n,)."""
    for length, known in evaluations.items():
        own = runs(words, length)
        if (known[np.minimum(np.searchsorted(known, own), len(known) - 1)] == own).any():
            return True
    return False
