"""Finds documents that say the same: equal ones by a digest, similar ones by MinHash (Broder 1997).

A signature holds, for each of 252 hash functions, the smallest hash of the runs of three words of a text; two
signatures agree in about as large a share of their numbers as the texts share runs. Texts that agree in one of 42 bands
of six numbers are compared by their signatures (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4). Two
texts that share 0.75 of their runs meet in a band with a probability of 0.9997, those that share 0.05 with 1e-6.

The signatures are datasketch's. Its index of bands is a dictionary of several KB a document; here one band after
another is sorted, which takes some bytes a document, and depends on the order of the input alone.
"""

import functools
from typing import Any

import numpy as np

from matmix.data.artifacts import from_extra
from matmix.data.prepare.cleaning.words import runs

BANDS, ROWS = 42, 6
_RUN = 3
# Runs that are hashed at once: a row of a signature each, of 1 KB.
_BATCH = 4096
# In a band the first document of a group is compared with the others, then the first of those unlike it, and so on.
_LEADERS = 8


@functools.cache
def _minhash() -> Any:
    with from_extra("clean", "--dedup minhash needs datasketch"):
        from datasketch import MinHash
    return MinHash(num_perm=BANDS * ROWS, seed=1, hashfunc=int, scheme="affine32")


def check_minhash() -> None:
    """Raises ValueError (one line) where datasketch is missing."""
    _minhash()


def signature(words: np.ndarray) -> np.ndarray:
    """Returns the signature of a text, uint32 (BANDS * ROWS,). words: of `hashed_words`, uint64 (n,), n >= 1."""
    sketch = _minhash()
    sketch.clear()
    hashes = np.unique(runs(words, min(_RUN, len(words))) >> np.uint64(32))
    for begin in range(0, len(hashes), _BATCH):
        sketch.update_batch(hashes[begin : begin + _BATCH].tolist())
    return sketch.hashvalues


def first_equal(*keys: np.ndarray) -> np.ndarray:
    """Returns for each row the first one with the same keys, int64 (n,). keys: arrays (n,)."""
    order = np.lexsort(keys)
    is_new = np.ones(len(order), bool)
    is_new[1:] = np.any([key[order[1:]] != key[order[:-1]] for key in keys], axis=0)
    first = np.empty(len(order), np.int64)
    first[order] = order[np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))]
    return first


def first_similar(signatures: np.ndarray, similarity: float) -> np.ndarray:
    """Returns for each document the first one of its group, int64 (n,): documents that are similar, or linked by a
    chain of similar ones, make a group. signatures: uint32 (n, BANDS * ROWS)."""
    root = list(range(len(signatures)))

    def find(one: int) -> int:
        while root[one] != one:
            root[one] = one = root[root[one]]
        return one

    for begin in range(0, BANDS * ROWS, ROWS):
        band = np.ascontiguousarray(signatures[:, begin : begin + ROWS])
        left = np.arange(len(band))
        for _ in range(_LEADERS):
            leader = left[first_equal(*band[left].T)]
            left, leader = left[left != leader], leader[left != leader]
            if not len(left):
                break
            alike = np.empty(len(left), bool)
            for at in range(0, len(left), _BATCH):
                pair = left[at : at + _BATCH], leader[at : at + _BATCH]
                alike[at : at + _BATCH] = (signatures[pair[0]] == signatures[pair[1]]).mean(axis=1) >= similarity
            for one, other in zip(left[alike].tolist(), leader[alike].tolist(), strict=True):
                one, other = sorted((find(one), find(other)))
                root[other] = one
            left = left[~alike]
    return np.array([find(one) for one in range(len(root))], np.int64)
