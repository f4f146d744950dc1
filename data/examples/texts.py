"""Texts and pairs of texts with one label each: a class, several classes, a value, or none."""

from functools import partial

import numpy as np

from matmix.data.examples.base import Document, Example, Examples, as_list, read_number
from matmix.data.loading.masking import IGNORED


class Texts(Examples):
    """Texts, or pairs of them where there is a column for the second ones. What a label is subclasses say."""

    optional = ("pair",)

    def __getitem__(self, number: int) -> Example:
        document = self.encoder.document(self.encoder.tokens(self.texts(number)), self.rows.where(number))
        return Example((document,), self.label(number))


class ClassTexts(Texts):
    """With one class each: labels (1,)."""

    names_in = staticmethod(lambda cell: [cell])

    def label(self, row: int) -> np.ndarray:
        value = self.cell("label", row)
        return self.nothing if value is None else np.array([self.class_number(value, row)], np.int64)


class MultiLabelTexts(Texts):
    """With any number of classes each, in a list or divided by commas: labels (1, classes), 0 or 1."""

    blank_labels = True
    names_in = staticmethod(partial(as_list, separator=","))

    def label(self, row: int) -> np.ndarray:
        cell = self.cell("label", row)
        if cell is None:
            return self.nothing
        labels = np.zeros((1, len(self.classes)), np.float32)
        for value in as_list(cell, ","):
            labels[0, self.class_number(value, row)] = 1
        return labels

    @property
    def nothing(self) -> np.ndarray:
        return np.full((1, len(self.classes)), np.nan, np.float32)


class ValueTexts(Texts):
    """With a value each, or several where several columns are named: labels (1, values)."""

    def prepare(self) -> None:
        # Of test examples the training ones, which need not be there any more, say nothing.
        labels = self.rows.columns.get("label", ()) if self.split == "test" else self.training_labels
        first = next((label for label in labels if label is not None), None)
        self.outputs = len(first) if isinstance(first, list) else 1

    def label(self, row: int) -> np.ndarray:
        values = self.values(row)
        return self.nothing if values is None else np.array([values], np.float32)

    def values(self, row: int) -> list[float] | None:
        """Returns the values of an example as the file has them; None where there are none."""
        cell = self.cell("label", row)
        if cell is None or (isinstance(cell, list) and all(value is None for value in cell)):
            return None
        where = self.rows.where(row)
        values = [read_number(value, where) for value in (cell if isinstance(cell, list) else [cell])]
        if len(values) != self.outputs:
            raise ValueError(f"{where}: {len(values)} values instead of {self.outputs}")
        return values

    @property
    def nothing(self) -> np.ndarray:
        return np.full((1, self.outputs or 1), np.nan, np.float32)


class TextPairs(Examples):
    """Pairs of texts that belong together, each a document of its own; a label, where there is one, says how similar
    they are: labels (1,), 0 for a pair that counts."""

    needed = ("text", "pair")
    labelled = False
    documents = 2

    def __getitem__(self, number: int) -> Example:
        where = self.rows.where(number)
        texts = self.encoder.tokens(self.texts(number))
        return Example(tuple(self.encoder.document([part], where) for part in texts), np.zeros(1, np.int64))

    @property
    def similarities(self) -> list[float] | None:
        """The label of every pair, or None."""
        labels = self.rows.columns.get("label", ())
        if all(value is None for value in labels):
            return None
        return [read_number(value, self.rows.where(number)) for number, value in enumerate(labels)]


class Choices(Examples):
    """A text and several ways to go on, of which one is right: each choice is a document, with the text before it.
    Labels (1,): the number of the right one, from 0 on."""

    needed = ("text", "choices")
    outputs = 1

    def prepare(self) -> None:
        first = self.rows.columns["choices"][0]
        self.documents = len(first) if isinstance(first, list) else 0
        for number, choices in enumerate(self.rows.columns["choices"]):
            as_many = isinstance(choices, list) and len(choices) == self.documents >= 2
            if not as_many or None in choices:
                raise ValueError(f"{self.rows.where(number)}: not a list of {max(self.documents, 2)} choices")

    def __getitem__(self, number: int) -> Example:
        where = self.rows.where(number)
        text, *choices = self.encoder.tokens(self.texts(number))
        return Example(tuple(self.encoder.document([text, choice], where) for choice in choices), self.label(number))

    def texts(self, row: int) -> list[str]:
        """Returns the text and its choices."""
        choices = (self.as_text(choice, "choices", row) for choice in self.cell("choices", row))
        return [*super().texts(row), *choices]

    def label(self, row: int) -> np.ndarray:
        cell, where = self.cell("label", row), self.rows.where(row)
        if cell is None:
            return self.nothing
        value = read_number(cell, where)
        if value not in range(self.documents):
            raise ValueError(f"{where}: label {cell} is none of the choices 0 to {self.documents - 1}")
        return np.array([int(value)], np.int64)


class Words(Examples):
    """Words and their labels, in lists or divided by white space. The first token of a word predicts its class; labels
    are (words,), without those of words that were cut off or have no token."""

    blank_labels = True  # those of no words
    by_position = True
    names_in = staticmethod(as_list)

    def __getitem__(self, number: int) -> Example:
        document, begins, kept = self._encoded(number)
        return Example((document,), self.label(number)[kept], document.starts[0] + begins[kept])

    def words(self, number: int) -> tuple[list[str], np.ndarray]:
        """Returns the words of an example, and bool (words,): those that have a token which was not cut off."""
        return self.texts(number), self._encoded(number)[2]

    def texts(self, row: int) -> list[str]:
        """Returns the words."""
        cell = self.cell("text", row)
        words = cell if isinstance(cell, list) else as_list(self.as_text(cell, "text", row))
        return [self.as_text(word, "text", row) for word in words]

    def _encoded(self, number: int) -> tuple[Document, np.ndarray, np.ndarray]:
        """Returns the tokens of all words; of each word the number of its first token, and whether it is there."""
        tokens = self.encoder.words(self.texts(number))
        document = self.encoder.document([[token for word in tokens for token in word]], self.rows.where(number))
        lengths = np.array([len(word) for word in tokens], np.int64)
        ends = np.cumsum(lengths)
        begins = ends - lengths
        return document, begins, (begins < document.kept[0]) & (begins < ends)

    def label(self, row: int) -> np.ndarray:
        count, cell = len(self.texts(row)), self.cell("label", row)
        if cell is None or (self.split == "test" and cell == ""):
            return np.full(count, IGNORED, np.int64)
        labels = as_list(cell)
        if len(labels) != count:
            raise ValueError(f"{self.rows.where(row)}: {count} words and {len(labels)} labels; give every word one")
        return np.array([self.class_number(label, row) for label in labels], np.int64)
