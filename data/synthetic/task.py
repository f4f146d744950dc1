"""What every generated task offers."""

import abc
from typing import ClassVar

import numpy as np

from matmix.data.loading.masking import IGNORED
from matmix.data.synthetic.config import SyntheticConfig


class Task(abc.ABC):
    """Makes samples of any length. Ids of its tokens are 0, 1, 2, ...; special tokens come after them."""

    name: ClassVar[str] = ""
    """Its name in configurations; set by the registry."""
    causal_form: ClassVar[bool] = True
    """Language models can be trained on it: each answer follows from tokens up to the position that predicts it."""
    bidirectional_form: ClassVar[bool]
    """Encoders can: mask tokens stand where the answers belong."""
    tokens: tuple[str, ...]
    """What they are called, without spaces."""
    answers: range
    """Ids that can be an answer."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config

    @abc.abstractmethod
    def check(self, seqlen: int) -> None:
        """Raises ValueError (one line) where no sample has this length."""

    @abc.abstractmethod
    def fill(self, draw: np.random.Generator, ids: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        """Writes one sample into ids and labels, both int64 (seqlen,); labels are `IGNORED` so far.

        draw: all that is random. mask: id of the mask token, for the bidirectional form; None for the causal one, whose
        labels stand at the positions that predict them.
        """

    def answer_counts(self, seqlen: int) -> np.ndarray:
        """int64 (len(tokens),): how often each token is the answer, in any unit. By default all answers are alike."""
        counts = np.zeros(len(self.tokens), dtype=np.int64)
        counts[self.answers] = 1
        return counts

    def sample(self, draw: np.random.Generator, seqlen: int, mask: int | None) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of one sample, both int64 (seqlen,); see `fill`."""
        ids, labels = np.zeros(seqlen, dtype=np.int64), np.full(seqlen, IGNORED, dtype=np.int64)
        self.fill(draw, ids, labels, mask)
        return ids, labels
