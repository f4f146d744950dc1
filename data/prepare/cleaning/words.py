"""Words of a text as hashes, and runs of them, by which texts are compared."""

import functools
import hashlib
import re
from collections.abc import Iterator

import numpy as np

# Chinese and Japanese stand without spaces: each of their characters is a word.
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def hashed_words(text: str) -> np.ndarray:
    """Returns a hash of each word, uint64 (words,). Case, punctuation and white space do not count."""
    words = _WORD.findall(text.lower())
    return np.fromiter(map(_hash, words), np.uint64, len(words))


@functools.lru_cache(1 << 16)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8"), digest_size=8).digest(), "big")


def runs(hashes: np.ndarray, length: int) -> np.ndarray:
    """Returns a hash of each run of so many words, uint64 (max(0, words - length + 1),)."""
    *_, longest = runs_up_to(hashes, length)
    return longest


def runs_up_to(hashes: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Yields what `runs` gives for one word, for two, and so on."""
    total = hashes
    for words in range(1, length + 1):
        total = total[:-1] * _FACTOR + hashes[words - 1 :] if words > 1 else total
        yield total


def hashed_rows(rows: np.ndarray) -> np.ndarray:
    """Returns a hash of each row, uint64 (n,). rows: (n, width), of whole numbers."""
    total = np.zeros(len(rows), np.uint64)
    for column in rows.T:
        total = total * _FACTOR + column
    return total
