"""Questions whose answers are a part of a text, which may be longer than the model reads at once."""

import re
from dataclasses import dataclass

import numpy as np

from matmix.data.examples.base import Document, Example, Examples
from matmix.data.loading.masking import IGNORED


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a text with its question."""

    row: int
    first: int
    """Number of the text's token that it begins with."""
    document: Document


class Answers(Examples):
    """Question (text), the text to search (pair), and its answers (label): texts that occur in it, none = it has no
    answer. In files of lists {"text": [...], "answer_start": [...]} as SQuAD has them, too.

    An example is a window over the text: windows of a long one share `data.examples.stride` tokens. Labels (1, 2):
    numbers, among the positions that count, of the first and last token of the answer; 0, the first position of the
    window, where it holds no answer.
    """

    needed = ("text", "pair")
    blank_labels = True
    by_position = True
    outputs = 2

    def prepare(self) -> None:
        if self.encoder.prefix is None:
            raise ValueError('question answering needs a token that stands for "no answer": set data.prefix = "cls"')
        self._spans: list[list[tuple[int, int]]] = []  # of each row: begin and end in the text of each word
        self._words: list[np.ndarray] = []  # of each row: the word of each token
        self._windows: list[Window] = []
        self._targets: list[tuple[int, int] | None] = []  # of each row: first and last token of the answer
        for row in range(len(self.rows)):
            self._add(row)

    def _add(self, row: int) -> None:
        where, (asked, text) = self.rows.where(row), self.texts(row)
        spans = [match.span() for match in re.finditer(r"\S+", text)]
        pieces = self.encoder.words([text[begin:end] for begin, end in spans])
        words = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        tokens = [token for piece in pieces for token in piece]
        [question] = self.encoder.tokens([asked])
        length = self.encoder.max_length
        around = 1 + 2 * (self.encoder.suffix is not None)
        question = question[: max(0, (length - around) // 2)]
        room = length - around - len(question)
        last = max(0, len(tokens) - room)
        step = room - self.config.stride if last else 1
        if step < 1:
            raise ValueError(
                f"{where}: windows of {room} tokens cannot share data.examples.stride = {self.config.stride} of them; "
                "lower it, or raise data.seqlen"
            )
        for first in range(0, last + step, step):
            document = self.encoder.document([question, tokens[first : first + room]], where)
            self._windows.append(Window(row, first, document))
        self._spans.append(spans)
        self._words.append(words)
        self._targets.append(self._target(row, text, spans, words))

    def _target(self, row: int, text: str, spans: list[tuple[int, int]], words: np.ndarray) -> tuple[int, int] | None:
        answers, cell = self.answers(row), self.cell("label", row)
        if not answers:
            return None
        stated = cell.get("answer_start") if isinstance(cell, dict) else None
        if isinstance(stated, list):
            stated = stated[0] if stated else None
        begin = text.find(answers[0]) if stated is None else stated
        if not isinstance(begin, int) or begin < 0 or not text.startswith(answers[0], begin):
            there = "" if stated is None else f" at answer_start {stated!r:.20}"
            raise ValueError(f"{self.rows.where(row)}: the answer {answers[0]!r:.60} is not in the text{there}")
        end = begin + len(answers[0])
        inside = [number for number, (left, right) in enumerate(spans) if left < end and right > begin]
        tokens = np.flatnonzero(np.isin(words, inside))
        return (int(tokens[0]), int(tokens[-1])) if len(tokens) else None

    def answers(self, row: int) -> list[str]:
        """Returns the right answers of a row; [] = there is none."""
        cell = self.cell("label", row)
        if isinstance(cell, dict):
            cell = cell.get("text")
        given = cell if isinstance(cell, list) else [cell]
        return [self.as_text(answer, "label", row) for answer in given if answer not in (None, "")]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, number: int) -> Example:
        window = self._windows[number]
        start, count = window.document.starts[1], window.document.kept[1]
        labels = np.full((1, 2), IGNORED, np.int64)
        if "label" in self.rows.columns:
            labels[:] = 0
            if (target := self._targets[window.row]) is not None:
                begin, end = (token - window.first for token in target)
                if begin >= 0 and end < count:
                    labels[0] = begin + 1, end + 1
        return Example((window.document,), labels, np.append(0, np.arange(start, start + count)))

    @property
    def nothing(self) -> np.ndarray:
        return np.full((1, 2), IGNORED, np.int64)

    def answer(self, number: int, first: int, last: int) -> tuple[int, str]:
        """Returns the row of window `number`, and the text between two of the positions that count, "" for position
        0."""
        window = self._windows[number]
        if first == 0:
            return window.row, ""
        words = self._words[window.row]
        left, right = (words[window.first + position - 1] for position in (first, last))
        spans = self._spans[window.row]
        return window.row, self.texts(window.row)[1][spans[left][0] : spans[right][1]]
