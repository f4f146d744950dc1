"""Parity: after every bit, whether an odd number of ones has come so far."""

import numpy as np

from matmix.data.synthetic.base import Puzzle


class Parity(Puzzle):
    """The word problem of the group with two elements, the least state there is.

    Any length; bits are fair, so half of the answers are 1.
    """

    bidirectional_form = False
    tokens = ("0", "1")
    answers = range(2)

    def check(self, seqlen: int) -> None:
        pass

    def fill(self, draw: np.random.Generator, ids: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        ids[:] = draw.integers(2, size=len(ids))
        labels[:] = np.cumsum(ids) % 2
