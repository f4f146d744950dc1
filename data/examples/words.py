"""Texts whose words have a class each, such as parts of speech or names."""

from __future__ import annotations

from functools import partial

import numpy as np

from matmix.data.config import ExamplesConfig
from matmix.data.examples.base import Example, Examples
from matmix.data.examples.encoding import Document, Encoder
from matmix.data.examples.labels import Classes, as_list
from matmix.data.labels import IGNORED


class Words(Examples):
    """Words and their labels, in lists or divided by white space. The first token of a word predicts its class; labels
    are (words,), without those of words that were cut off or have no token."""

    by_position = True

    def __init__(self, config: ExamplesConfig, encoder: Encoder, split: str) -> None:
        super().__init__(config, encoder, split)
        names = [name for cell in self.training_labels for name in as_list(cell)] if not config.labels else []
        self.classes = Classes(config.labels) if config.labels else Classes.found(names)
        self.outputs = len(self.classes)
        for number in range(len(self)):
            self._labels(number, len(as_list(self.cell("text", number))))

    def __getitem__(self, number: int) -> Example:
        document, begins, kept = self._encoded(self._words(number), number)
        return Example((document,), self._labels(number, len(kept))[kept], document.starts[0] + begins[kept])

    def words(self, number: int) -> tuple[list[str], np.ndarray]:
        """The words of an example, and bool (words,): those that have a token which was not cut off."""
        words = self._words(number)
        return words, self._encoded(words, number)[2]

    def _words(self, number: int) -> list[str]:
        return [str(word) for word in as_list(self.cell("text", number))]

    def _encoded(self, words: list[str], number: int) -> tuple[Document, np.ndarray, np.ndarray]:
        """The tokens of all words; of each word the number of its first token, and whether it is there."""
        tokens = self.encoder.words(words)
        document = self.encoder.document([[token for word in tokens for token in word]], self.rows.where(number))
        ends = np.cumsum([len(word) for word in tokens], dtype=np.int64)
        begins = ends - np.array([len(word) for word in tokens], np.int64)
        return document, begins, (begins < document.kept[0]) & (begins < ends)

    def _labels(self, number: int, count: int) -> np.ndarray:
        if (cell := self.cell("label", number)) is None:
            return np.full(count, IGNORED, np.int64)
        labels, where = as_list(cell), partial(self.rows.where, number)
        if len(labels) != count:
            raise ValueError(f"{where()}: {count} words and {len(labels)} labels; give every word one")
        return np.array([self.classes.number(label, where) for label in labels], np.int64)
