"""Copying of tokens: in their order from among noise, and backwards.

Selective copying (Mamba, Gu and Dao 2023, arXiv 2312.00752): tokens among noise, then the tokens in their order.

    . s4 . . s1 . > >        causal: s4 is predicted at the first >, s1 at the second
    . s4 . . s1 . _ _        bidirectional: masks in their place

The places are drawn anew for every sample. Longer samples have as many tokens and more noise.

Reversal: different tokens, a separator, and the tokens backwards.

    . . s4 s1 s2 > s2 s1     causal: s2 is predicted at the >, s1 at s2, s4 at s1

Longer samples have as many tokens, and more fillers before them.
"""

import numpy as np

from matmix.data.config import SyntheticConfig
from matmix.data.synthetic.base import Puzzle


class SelectiveCopying(Puzzle):
    """Tokens are uniform, so a constant guess is right once in `symbols` times."""

    bidirectional_form = True

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        self.tokens = (*(f"s{i}" for i in range(config.symbols)), ".", ">")
        self.answers = range(config.symbols)
        self.shortest = 2 * config.items

    def fill(self, draw: np.random.Generator, ids: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        n, items = self.config.symbols, self.config.items
        symbols = draw.integers(n, size=items)
        ids[:-items] = n
        ids[np.sort(draw.permutation(len(ids) - items)[:items])] = symbols
        ids[-items:] = n + 1 if mask is None else mask
        labels[-items:] = symbols


class Reversal(Puzzle):
    """What an encoder-decoder learns from; `>` has id 0. A constant guess is right once in `symbols` times."""

    bidirectional_form = False

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        n = config.symbols
        self.tokens = (">", ".", *(f"s{i}" for i in range(n)))
        self.answers = range(2, n + 2)
        self.shortest = 2 * config.items
        if config.items > n:
            raise ValueError(
                f"data.synthetic.items = {config.items} different tokens, but data.synthetic.symbols = {n}; raise "
                "symbols or lower items"
            )

    def fill(self, draw: np.random.Generator, ids: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        items = self.config.items
        symbols = 2 + draw.permutation(self.config.symbols)[:items]
        ids[: -2 * items] = 1
        ids[-2 * items : -items] = symbols
        ids[-items] = 0
        ids[len(ids) - items + 1 :] = symbols[:0:-1]
        labels[-items:] = symbols[::-1]
