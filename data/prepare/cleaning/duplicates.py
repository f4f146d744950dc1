"""Finds documents that say the same: equal ones by a digest, similar ones by MinHash (Broder 1997).

A signature holds, for each of 252 hash functions, the smallest hash of the runs of three words of a text; two
signatures agree in about as large a share of their numbers as the texts share runs. Texts that agree in one of 42 bands
of six numbers are compared by their signatures (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4). Two
texts that share 0.75 of their runs meet in a band with a probability of 0.9997, those that share 0.05 with 1e-6.

The signatures are datasketch's. Its index of bands is a dictionary of several KB a document; here one band after
another is sorted, which takes some 100 bytes a document, and depends on the order of the input alone.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from matmix.data.artifacts import from_extra
from matmix.data.prepare.cleaning.words import hashed_rows, runs

BANDS, ROWS = 42, 6
_RUN = 3
# Runs that are hashed at once: a row of a signature each, of 1 KB.
_BATCH = 4096
# Bands whose keys are in memory at once, of 8 bytes a document: the signatures are read through for each so many.
_BANDS_AT_ONCE = 6
NEIGHBOURS = 8
"""A document is compared with the next so many of those that agree in a band: pages of one site may be millions."""


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


class Stacked:
    """Arrays, one after another, of which rows are taken."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self._starts = np.cumsum([0, *map(len, arrays)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def blocks(self, rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields all rows, at most so many at once, each time with the number of the first."""
        for start, array in zip(self._starts.tolist(), self.arrays, strict=False):
            yield from ((start + begin, array[begin : begin + rows]) for begin in range(0, len(array), rows))

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of the arrays that rows are from."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows. rows: int64 (n,)."""
        owners = self.owners(rows)
        taken = np.empty((len(rows), *self.arrays[0].shape[1:]), self.arrays[0].dtype)
        for owner in np.unique(owners).tolist():
            taken[owners == owner] = self.arrays[owner][rows[owners == owner] - self._starts[owner]]
        return taken


def first_similar(signatures: Stacked, first: np.ndarray, similarity: float) -> np.ndarray:
    """Returns for each document the first one of its group, int64 (n,). Documents are linked if they agree in a band,
    with fewer than `NEIGHBOURS` between them that do, and in the share `similarity` of their signatures; those that are
    linked by a chain make a group. signatures: uint32 (n, BANDS * ROWS). first: `first_equal`; only the first of equal
    documents is compared."""
    root = first.copy()
    kept = np.flatnonzero(first == np.arange(len(first)))
    for bands in np.split(np.arange(BANDS), range(_BANDS_AT_ONCE, BANDS, _BANDS_AT_ONCE)):
        keys = np.empty((len(bands), len(signatures)), np.uint64)
        for begin, block in signatures.blocks(_BATCH):
            rows = block.reshape(-1, BANDS, ROWS)
            for key, band in zip(keys, bands, strict=True):
                key[begin : begin + len(block)] = hashed_rows(rows[:, band])
        for key in keys:
            root[:] = root[root]  # keeps chains short
            order = kept[np.argsort(key[kept], kind="stable")]
            key = key[order]
            for step in range(1, NEIGHBOURS + 1):
                pairs = np.flatnonzero(key[step:] == key[:-step])
                for some in np.split(pairs, range(_BATCH, len(pairs), _BATCH)):
                    _link(root, signatures, order[some], order[some + step], similarity)
    return _tops(root, np.arange(len(root)))


def _link(root: np.ndarray, signatures: Stacked, ones: np.ndarray, others: np.ndarray, similarity: float) -> None:
    """Puts similar ones of pairs of documents into one group."""
    apart = _tops(root, ones) != _tops(root, others)
    ones, others = ones[apart], others[apart]
    alike = (signatures.take(ones) == signatures.take(others)).mean(axis=1) >= similarity
    for pair in zip(ones[alike], others[alike], strict=True):
        one, other = sorted(_tops(root, np.array(pair)).tolist())
        root[other] = one


def _tops(root: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Returns the first documents of groups. root: of each an earlier one of its group; of the first, itself."""
    tops = root[documents]
    while (root[tops] != tops).any():
        tops = root[tops]
    return tops
