"""Defines what every source of generated samples offers, and what those of tokens have in common."""

import abc
from typing import ClassVar

import numpy as np

from matmix.data.config import SyntheticConfig
from matmix.data.loading.masking import IGNORED


class GeneratedSamples(abc.ABC):
    """Makes samples of any length: inputs that a model reads, and labels. Subclass `Puzzle` for tokens; a source of
    other inputs gives `padding` and `fill`."""

    name: ClassVar[str] = ""
    """Its name in configurations; set by the registry."""
    causal_form: ClassVar[bool] = True
    """Causal models can be trained on it: each label follows from inputs up to the position that predicts it."""
    bidirectional_form: ClassVar[bool]
    """Models that read the whole sequence can."""
    one_answer: ClassVar[bool] = False
    """Of tokens: a sample has one answer, at its last position, so that it is a class of the whole sample. The answers
    are the first of `tokens`."""
    more_options: ClassVar[tuple[str, ...]] = ()
    """The options of data.synthetic that its samples depend on, besides symbols, items, depth and arguments."""
    tokens: tuple[str, ...] = ()
    """What its tokens are called, without spaces; none where the inputs are no tokens."""

    shortest: int = 1
    """Positions that a sample has at least."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config

    def check(self, seqlen: int) -> None:
        """Raises ValueError (one line) where no sample has this length."""
        if seqlen < self.shortest:
            raise ValueError(
                f"data.seqlen = {seqlen} is too short for {self.name}, whose samples have at least {self.shortest} "
                "tokens with the options in data.synthetic; raise data.seqlen, or lower those"
            )

    @abc.abstractmethod
    def padding(self, rows: int, seqlen: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (inputs, labels) of rows without a sample: (rows, seqlen, ...) each, of the types of `Batch`."""

    @abc.abstractmethod
    def fill(self, draw: np.random.Generator, inputs: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        """Writes one sample into a row of `padding`: inputs and labels, both (seqlen, ...). draw: all that is random.
        mask: id of the mask token (`mask_id`), for the bidirectional form; None for the causal one, whose labels stand
        at the positions that predict them."""

    mask_id = 0
    """What `fill` is given as the mask in the bidirectional form; without meaning where the inputs are no tokens."""

    def count(self, inputs: np.ndarray) -> int:
        """Returns how many of the inputs (seqlen, ...) of a sample are no padding."""
        return len(inputs)


class Puzzle(GeneratedSamples):
    """Samples of tokens with ids 0, 1, 2, ...; the special tokens <unk>, <pad> and <mask> come after them."""

    answers: range
    """Ids that can be an answer."""

    @property
    def pad_id(self) -> int:
        return len(self.tokens) + 1

    @property
    def mask_id(self) -> int:
        return len(self.tokens) + 2

    def padding(self, rows: int, seqlen: int) -> tuple[np.ndarray, np.ndarray]:
        shape = rows, seqlen
        return np.full(shape, self.pad_id, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)

    @abc.abstractmethod
    def fill(self, draw: np.random.Generator, ids: np.ndarray, labels: np.ndarray, mask: int | None) -> None:
        """Writes one sample, as `GeneratedSamples.fill`; ids and labels int64 (seqlen,), labels are `IGNORED` so
        far."""

    def count(self, inputs: np.ndarray) -> int:
        return int((inputs != self.pad_id).sum())

    def answer_counts(self, seqlen: int) -> np.ndarray:
        """Returns int64 (len(tokens),): how often each token is the answer, in any unit; by default all alike."""
        counts = np.zeros(len(self.tokens), dtype=np.int64)
        counts[self.answers] = 1
        return counts

    def sample(self, draw: np.random.Generator, seqlen: int, mask: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns (input_ids, labels) of one sample, both int64 (seqlen,); see `fill`."""
        ids, labels = np.zeros(seqlen, dtype=np.int64), np.full(seqlen, IGNORED, dtype=np.int64)
        self.fill(draw, ids, labels, mask)
        return ids, labels
