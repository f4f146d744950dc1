"""Reverse complements of documents of DNA: both strands say the same, so training may read either."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from matmix.data.rng import STRANDS, generator

if TYPE_CHECKING:
    from matmix.data.tokenizer import Tokenizer

_PAIRS = ("AT", "CG", "at", "cg")


class Strands:
    """Turns documents of a sample into their reverse complements, each with a probability. The draws come from a
    generator keyed by (seed, epoch, sample). tokenizer: has one token for each letter, else ValueError (one line)."""

    def __init__(self, probability: float, tokenizer: Tokenizer, seed: int) -> None:
        self.probability, self.seed = probability, seed
        self.complement = np.arange(tokenizer.vocab_size)
        for pair in _PAIRS:
            ids = tokenizer.encode(pair)
            if len(ids) != 2 or tokenizer.encode(pair[0]) != ids[:1] or tokenizer.unknown_id in ids:
                raise ValueError(
                    "data.reverse_complement needs a tokenizer with one token for each letter, and "
                    f"{tokenizer.path} has none for {pair[0]} and {pair[1]}: prepare with --tokenizer dna"
                )
            self.complement[ids] = ids[::-1]
        self.special = np.zeros(tokenizer.vocab_size, bool)
        self.special[tokenizer.special_ids] = True

    def turn(self, tokens: np.ndarray, begins: Iterable[int], epoch: int, sample: int) -> None:
        """Changes the tokens of a sample, int64 (n,) without padding, in place. begins: where its documents begin.
        Special tokens around a document stay where they are; of a document that goes on in another sample, the part in
        this one is turned."""
        borders = sorted({0, *begins, len(tokens)})
        draws = generator(self.seed, epoch, STRANDS, sample).random(len(borders))
        for (begin, end), draw in zip(itertools.pairwise(borders), draws, strict=False):
            letters = begin + np.flatnonzero(~self.special[tokens[begin:end]])
            if draw < self.probability and len(letters):
                inside = slice(letters[0], letters[-1] + 1)
                tokens[inside] = self.complement[tokens[inside][::-1]]
