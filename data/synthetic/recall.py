"""Multi-query associative recall (Zoology, Arora et al. 2023, arXiv 2312.04927).

    k3 v7 k0 v2 . . k0 . . . k3 .        causal: v2 is predicted at the second k0, v7 at the second k3
    k3 v7 k0 v2 . . k0 _ . . k3 _        bidirectional: the masks _ after them are to be filled in

First come `items` pairs of a key and its value, all keys different; then, among fillers, each key once more, in any
order and at places drawn uniformly (Zoology's default prefers near ones). Longer samples have more fillers.
"""

import numpy as np

from matmix.data.config import SyntheticConfig
from matmix.data.synthetic.base import Puzzle


class MultiQueryRecall(Puzzle):
    """A constant guess is right once in `symbols` times; one of the sample's own values, once in `items` times."""

    bidirectional_form = True

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        n = config.symbols
        self.tokens = (*(f"k{i}" for i in range(n)), *(f"v{i}" for i in range(n)), ".")
        self.answers = range(n, 2 * n)
        self.shortest = 4 * config.items
        if config.items > n:
            raise ValueError(
                f"data.synthetic.items = {config.items} pairs need as many different keys, but "
                f"data.synthetic.symbols = {n}; raise symbols or lower items"
            )

    def fill(self, draw: np.random.Generator, ids: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        n, items = self.config.symbols, self.config.items
        keys = draw.permutation(n)[:items]
        values = n + draw.integers(n, size=items)
        ids[0 : 2 * items : 2], ids[1 : 2 * items : 2] = keys, values
        ids[2 * items :] = len(self.tokens) - 1
        slots = draw.permutation((len(ids) - 2 * items) // 2)[:items]  # of two tokens: a key, and what follows it
        queries = 2 * items + 2 * slots
        ids[queries] = keys
        if mask is None:
            labels[queries] = values
        else:
            ids[queries + 1], labels[queries + 1] = mask, values
