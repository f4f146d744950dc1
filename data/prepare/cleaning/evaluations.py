"""Finds documents that hold texts of an evaluation: those that share a run of 13 words with one, as for GPT-3
(arXiv 2005.14165, appendix C). Shorter runs are common in any text. An example of 8 to 12 words counts as one run, and
a shorter one not at all. GPT-3 cut out the surroundings of a match; here the whole document goes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from matmix.data.artifacts import parse_json
from matmix.data.prepare.cleaning.words import hashed_words, runs

LONGEST, SHORTEST = 13, 8

Runs = dict[int, np.ndarray]
"""Number of words -> the hashes of runs of so many, uint64 (n,), ascending."""


def read_evaluations(paths: Sequence[str]) -> Runs:
    """Returns the runs of the texts in files: of a .txt file, in which each line is also an example; and of every text
    in the objects of a .jsonl file. Raises ValueError (one line) for files that cannot be read and for
    those without a run."""
    found: dict[int, list[np.ndarray]] = {}
    for path in paths:
        count = 0
        for text in _texts(Path(path).expanduser()):
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
            raise ValueError(f"{path} has no text of {SHORTEST} words or more to look for in the documents")
    return {length: np.unique(np.concatenate(lists)) for length, lists in found.items()}


def is_contaminated(words: np.ndarray, evaluations: Runs) -> bool:
    """Returns whether a text has one of the runs. words: of `hashed_words`, uint64 (n,)."""
    for length, known in evaluations.items():
        own = runs(words, length)
        if (known[np.minimum(np.searchsorted(known, own), len(known) - 1)] == own).any():
            return True
    return False


def _texts(path: Path) -> Iterator[str]:
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{path} has a suffix that cannot be read; give evaluations as .txt or .jsonl files")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"the evaluation file {path} is not UTF-8") from None
    if path.suffix == ".txt":
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield from _strings(parse_json(line, f"line {number} of the evaluation file {path}"))


def _strings(value: object) -> Iterator[str]:
    """Yields the texts in a JSON value. Half a surrogate pair is no character, and no text to look for."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one.encode("utf-8", "ignore").decode("utf-8")
        elif isinstance(one, dict | list):
            left.extend(one.values() if isinstance(one, dict) else one)
