"""The base class of the kinds of examples: a numbered sequence of them, each tokenised when it is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from matmix.data.config import ExamplesConfig
from matmix.data.examples.readers import read_rows
from matmix.data.loading.masking import IGNORED
from matmix.data.tokenizer import Tokenizer


def as_list(cell: Any, separator: str | None = None) -> list[Any]:
    """Returns the items of a cell: of a list, or of a text by `separator` (None = white space)."""
    if isinstance(cell, list | tuple):
        return list(cell)
    return [item.strip() for item in str(cell).split(separator) if item.strip()]


def name_of(value: Any) -> str:
    """Returns a class as text, however the file has it."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


class Classes:
    """Names of classes in the order of the model's outputs."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    @classmethod
    def among(cls, values: Iterable[Any]) -> Classes:
        """Returns the classes among the labels of the training examples: sorted, numbers by their size."""
        names = {name_of(value) for value in values}
        return cls(sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names))

    def __len__(self) -> int:
        return len(self.names)

    def number(self, value: Any, where: Callable[[], str]) -> int:
        """Returns the number of a class. Raises ValueError (one line) for one that there is not."""
        name = name_of(value)
        if (number := self._numbers.get(name)) is None:
            near = difflib.get_close_matches(name, self.names, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(self.names[:20])}"
            raise ValueError(
                f'{where()}: label "{name}" is not among the {len(self)} classes of the training examples; {hint}'
            )
        return number


def read_number(value: Any, where: str) -> float:
    """Returns a value to predict. Raises ValueError (one line) for what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = np.nan
    if not np.isfinite(number):
        raise ValueError(f"{where}: label {value!r} is not a number")
    return number


@dataclass(frozen=True, slots=True)
class Document:
    """One sequence of tokens."""

    ids: np.ndarray
    """int64 (L,)."""
    types: np.ndarray
    """int64 (L,): 1 for the tokens of the second text and the special token behind it, else 0."""
    starts: tuple[int, ...] = ()
    """Position of the first token of each text."""
    kept: tuple[int, ...] = ()
    """Number of tokens of each text that were not cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Puts tokens of texts together. prefix, suffix: special tokens around each, or None."""

    tokenizer: Tokenizer
    prefix: int | None
    suffix: int | None
    max_length: int
    truncate: bool
    pad_id: int = field(default=0)

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text, without special ones."""
        return self.tokenizer.encode_batch(list(texts))

    def words(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each word of a text, of which there may be none."""
        if self.tokenizer.marks_words:  # a space more would be a token more
            return self.tokens(words)
        return self.tokens([word if number == 0 else f" {word}" for number, word in enumerate(words)])

    def document(self, parts: Sequence[Sequence[int]], where: str) -> Document:
        """Returns one or two texts with their special tokens; `where` names them in errors. Raises ValueError (one
        line) where they are too long and not to be cut."""
        lengths = [len(part) for part in parts]
        around = (self.prefix is not None) + (self.suffix is not None) * len(parts)
        room = self.max_length - around
        if sum(lengths) > room and not self.truncate:
            raise ValueError(
                f"{where}: {sum(lengths) + around} tokens with the special ones, but data.seqlen = {self.max_length}; "
                "shorten the text, raise data.seqlen, or set data.examples.truncate = true"
            )
        lengths = longest_first(lengths, max(room, 0))
        ids: list[int] = [] if self.prefix is None else [self.prefix]
        types, starts = [0] * len(ids), []
        for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            starts.append(len(ids))
            ids += part[:length]
            if self.suffix is not None:
                ids.append(self.suffix)
            types += [number] * (len(ids) - len(types))
        if not ids:  # no model meets an empty document
            ids, types = [self.pad_id], [0]
        return Document(np.array(ids, np.int64), np.array(types, np.int64), tuple(starts), tuple(lengths))

    @property
    def padding(self) -> Document:
        """The document of an example that there is not."""
        return Document(np.array([self.pad_id], np.int64), np.zeros(1, np.int64))


def longest_first(lengths: Sequence[int], room: int) -> list[int]:
    """Returns the lengths, cut until their sum is at most `room`, always the longest one first, of equals the last."""
    lengths = list(lengths)
    while (over := sum(lengths) - room) > 0:
        longest = max(range(len(lengths)), key=lambda i: (lengths[i], i))
        others = [length for i, length in enumerate(lengths) if i != longest]
        lengths[longest] -= min(over, max(1, lengths[longest] - max(others, default=0)))
    return lengths


@dataclass(frozen=True, slots=True)
class Example:
    """One example: what the model reads, and what it is to predict."""

    documents: tuple[Document, ...]
    labels: np.ndarray
    """(n, ...), int64 with -100 or float32 with NaN where there is nothing to predict."""
    positions: np.ndarray | None = None
    """int64 (n,): positions of its only document whose outputs count; None = an output for each document."""


class Examples:
    """The examples of a split. A subclass reads one kind of them; tasks name it."""

    needed: ClassVar[tuple[str, ...]] = ("text",)
    """What the files must have, besides labels in the training and validation split."""
    optional: ClassVar[tuple[str, ...]] = ()
    labelled: ClassVar[bool] = True
    """True where examples to train on have a label."""
    blank_labels: ClassVar[bool] = False
    """True where a blank label says something, such as no class at all; elsewhere it is a missing one."""
    by_position: ClassVar[bool] = False
    """True where the model gives outputs for positions, not for documents."""
    names_in: ClassVar[Callable[[Any], Iterable[Any]] | None] = None
    """Gives the classes in a cell of the label column; None where labels are no classes."""
    documents: int = 1
    """Number of documents of each example."""
    outputs: int | None = None
    """What the model predicts for each document or position; None = not said by the data."""
    classes: Classes = Classes(())

    def __init__(self, config: ExamplesConfig, encoder: Encoder, split: str) -> None:
        """Raises FileNotFoundError or ValueError (one line) for files that cannot be used."""
        self.config, self.encoder, self.split = config, encoder, split
        needed, optional = self.needed, self.optional
        if self.labelled and split != "test":
            needed = (*needed, "label")
        else:
            optional = (*optional, "label")
        self.rows = read_rows(config.path(split), config, needed, optional, filled=self._filled)
        if self.names_in is not None:
            self.classes = Classes(config.labels)
            if not config.labels:
                self.classes = Classes.among(name for cell in self.training_labels for name in self.names_in(cell))
            self.outputs = len(self.classes)
        self.prepare()
        for number in range(len(self.rows)):
            self.label(number)
            self.texts(number)

    def prepare(self) -> None:
        """Readies what labels and examples need, once the rows are read."""

    @cached_property
    def training_labels(self) -> list[Any]:
        """The label column of the training examples. Raises ValueError (one line) where none are named."""
        if not self.config.train:
            raise ValueError(
                "the classes have no names: set data.examples.labels to them (--labels of matmix evaluate), or "
                "data.examples.train to the examples to train on"
            )
        rows = self.rows
        if self.split != "train":
            needed = (*self.needed, "label")
            rows = read_rows(self.config.path("train"), self.config, needed, self.optional, filled=self._filled)
        return list(rows.columns["label"])

    @property
    def _filled(self) -> tuple[str, ...]:
        return () if self.blank_labels else ("label",)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Example:
        raise NotImplementedError

    def label(self, row: int) -> np.ndarray:
        """Returns the label of a row, (n, ...), `nothing` where it has none. Raises ValueError (one line)."""
        return self.nothing

    def class_number(self, value: Any, row: int) -> int:
        return self.classes.number(value, lambda: self.rows.where(row))

    def cell(self, name: str, row: int) -> Any:
        """Returns the row's value in a column; None where there is no such column."""
        return self.rows.columns[name][row] if name in self.rows.columns else None

    def texts(self, row: int) -> list[str]:
        """Returns the texts of a row. Raises ValueError (one line) for what is none."""
        cells = ((name, self.cell(name, row)) for name in ("text", "pair"))
        return [self.as_text(cell, name, row) for name, cell in cells if cell is not None]

    def as_text(self, value: Any, name: str, row: int) -> str:
        """Returns a value of a column as text: a text or a number. Raises ValueError (one line) for others, which a
        model would read as Python writes them."""
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        column = self.config.columns.get(name, name)
        raise ValueError(f"{self.rows.where(row)}: {column} holds {value!r:.40}, which is no text")

    @property
    def nothing(self) -> np.ndarray:
        """The labels of an example that there is not."""
        return np.full(1, IGNORED, np.int64)

    @property
    def facts(self) -> dict[str, Any]:
        """The data that a saved position belongs to: JSON values."""
        return {"examples": self.rows.digest, "classes": list(self.classes.names)}
