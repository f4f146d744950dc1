"""Answers that are a part of a text."""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from matmix.data.examples.answers import Answers
from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import IGNORED
from matmix.train.tasks.base import Loss, Metric, Predicted
from matmix.train.tasks.finetuning.base import ExampleTask
from matmix.train.tasks.metrics import share

_ONE_ANSWER = "one answer for all"


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    longest_answer: int = 30
    """Tokens of an answer."""
    unanswerable: bool = False
    """Questions may have no answer; otherwise there is always one."""
    null_threshold: float = 0.0
    """No answer is given where its score is above that of the best answer by more than this."""


class QuestionAnswering(ExampleTask):
    """Where in a window the answer starts and ends, the first position standing for none. Of the windows over a text
    the answer with the highest score counts."""

    architectures = ("span_classifier",)
    examples = Answers
    target_share = 1.0
    Options = AnswerOptions
    loss_metric = Metric(name="loss", title="loss", unit="nats per window")
    metrics = (share("f1", "F1", _ONE_ANSWER), share("exact_match", "exact match", _ONE_ANSWER))

    def cost(self, outputs: Tensor, batch: Batch) -> Loss:
        # Positions are the classes, of which there is one for either end.
        total = F.cross_entropy(_by_window(outputs, batch), batch.labels, ignore_index=IGNORED, reduction="sum") / 2
        return Loss(total, total.detach(), {})

    def predictions(self, outputs: Tensor, batch: Batch) -> Predicted:
        """Returns (windows, 4): first and last position of the best answer, its score, and that of none."""
        logits = _by_window(outputs, batch)
        windows, width = logits.shape[:2]
        reach = torch.ones(width, width, dtype=torch.bool, device=logits.device)
        reach = reach.triu() & reach.tril(self.options.longest_answer - 1)
        reach[0] = False
        values = logits.new_zeros(windows, 4)
        for value, pair in zip(values, logits, strict=True):
            scores = (pair[:, None, 0] + pair[None, :, 1]).masked_fill(~reach, -torch.inf)
            scores = scores.clamp(min=torch.finfo(scores.dtype).min)  # a text without a token has no answer
            first, last = divmod(int(scores.argmax()), width)
            value[0], value[1], value[2], value[3] = first, last, scores[first, last], pair[0].sum()
        starts = F.pad(_windows(batch).diff() != 0, (1, 0), value=True)[: len(batch.examples)]  # there may be none
        return Predicted(batch.examples[starts], values, batch.labels)

    def answers(self, predicted: Predicted, examples: Answers) -> dict[int, str]:
        """Returns the answer to each question, by its row."""
        best: dict[int, tuple[float, str]] = defaultdict(lambda: (-np.inf, ""))
        nothing: dict[int, float] = defaultdict(lambda: np.inf)
        for number, (first, last, score, null) in zip(predicted.numbers.tolist(), predicted.values, strict=True):
            row, answer = examples.answer(number, int(first), int(last))
            best[row] = max(best[row], (float(score), answer), key=lambda pair: pair[0])
            nothing[row] = min(nothing[row], float(null))
        threshold = self.options.null_threshold if self.options.unanswerable else np.inf
        return {row: "" if nothing[row] - score > threshold else answer for row, (score, answer) in best.items()}

    def scores(self, predicted: Predicted, examples: Answers) -> dict[str, float]:
        answers = self.answers(predicted, examples)
        return _answer_scores((given, examples.answers(row) or [""]) for row, given in answers.items())

    def control(self, predicted: Predicted, examples: Answers) -> dict[str, float]:
        """Returns the scores of the answer that is right most often, which may be none."""
        wanted = [examples.answers(row) or [""] for row in self.answers(predicted, examples)]
        [(most, _)] = Counter(" ".join(normalized(text)) for right in wanted for text in set(right)).most_common(1)
        return _answer_scores((most, right) for right in wanted)

    def prediction_rows(self, predicted: Predicted, examples: Answers) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the answer to each question, "" = none, and the list of right ones."""
        known = "label" in examples.rows.columns
        for row, answer in self.answers(predicted, examples).items():
            yield row, {"predicted": answer, "label": examples.answers(row) if known else None}

    def example_batch(self, inputs: Tensor) -> Batch:
        batch = super().example_batch(inputs)
        batch.labels = torch.zeros(len(inputs), 2, dtype=torch.long)
        batch.select = torch.arange(inputs.numel())
        batch.examples = batch.select // inputs.shape[1]
        return batch


def _windows(batch: Batch) -> Tensor:
    """Returns int64 (n,): the document that each output lies in."""
    if batch.cu_seqlens is None:
        return batch.select // batch.inputs.shape[1]
    return torch.bucketize(batch.select, batch.cu_seqlens, right=True)


def _by_window(outputs: Tensor, batch: Batch) -> Tensor:
    """Returns the outputs (n, 2) as (windows, positions, 2), -inf where a window has fewer positions."""
    counts = _windows(batch).unique_consecutive(return_counts=True)[1]
    if not len(counts):
        return outputs.new_zeros(0, 1, 2)
    return torch.nn.utils.rnn.pad_sequence(outputs.split(counts.tolist()), True, -torch.inf)


def _answer_scores(answers: Iterable[tuple[str, Sequence[str]]]) -> dict[str, float]:
    """Returns the means over pairs of the answer that is given and the right ones."""
    exact, f1 = np.mean([(exact_match(*pair), overlap_f1(*pair)) for pair in answers], axis=0).tolist()
    return {"exact_match": exact, "f1": f1}


def normalized(answer: str) -> list[str]:
    """Returns the words of an answer as SQuAD compares them: small letters, without punctuation and articles."""
    letters = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", letters).split()


def exact_match(given: str, right: Sequence[str]) -> float:
    """Returns 1 where an answer is one of the right ones."""
    return float(any(normalized(given) == normalized(answer) for answer in right))


def overlap_f1(given: str, right: Sequence[str]) -> float:
    """Returns the F1 of the words of an answer, against the right one for which it is largest (arXiv 1606.05250)."""

    def f1(answer: str) -> float:
        ours, theirs = normalized(given), normalized(answer)
        if not ours or not theirs:
            return float(ours == theirs)
        common = sum((Counter(ours) & Counter(theirs)).values())
        return 2 * common / (len(ours) + len(theirs))

    return max(f1(answer) for answer in right)
