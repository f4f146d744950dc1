"""Scores texts by their likelihood under a language model, in windows or with carried state."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F

from matmix.model.interop.export.generation_state import advance
from matmix.train.tasks.cross_entropy import row_cross_entropy
from matmix.use.opening import TrainedModel

_PACK = 1 << 14  # tokens in one forward pass
_CARRIED = 512  # tokens in one step of carried state, of all of which there are logits


@dataclasses.dataclass(slots=True)
class Score:
    """Sums over texts, and the measures that they give."""

    nats: float = 0.0
    """Negative log-likelihood of the tokens that are predicted."""
    tokens: int = 0
    """Number of tokens that are predicted."""
    bytes: int = 0
    """UTF-8 bytes of their text."""
    words: int = 0
    """Words, separated by white space."""
    texts: int = 0
    method: str = ""
    """How they were read, for people."""

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss per token."""
        return math.exp(min(self.nats / self.tokens, 700.0))

    @property
    def word_perplexity(self) -> float:
        return math.exp(min(self.nats / max(self.words, 1), 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def windows_of(ids: Sequence[int], window: int, stride: int) -> Iterator[tuple[Sequence[int], int]]:
    """Yields the windows in which the tokens after the first are predicted, each once: consecutive tokens, and the
    number of those at the end that are predicted in this window.

    A model reads all tokens of a window but the last, `window` of them at most. The first window predicts all that it
    reads; each other one the next `stride` tokens, for which it reads the `window` tokens before the last of them.
    """
    begin, count = 0, len(ids) - 1
    while begin < count:
        end = min(count, begin + (stride if begin else window))
        yield ids[max(0, end - window) : end + 1], end - begin
        begin = end


@torch.inference_mode()
def score_texts(opened: TrainedModel, texts: Iterable[str], *, window: int = 0, stride: int = 0) -> Score:
    """Scores each text in windows as `windows_of` cuts them, many in one forward pass as packed documents. A text
    begins as documents began in training.

    Without a token that starts documents, the first token of a text is not predicted.

    Args:
        window: tokens that the model reads at a time; 0 = as many as in training.
        stride: tokens by which the window moves on; 0 = half a window.
    Raises ValueError (one line) for a model that is no language model, sizes that it cannot have, and texts without a
    token to predict.
    """
    _check_gives_probabilities(opened)
    window = window or opened.seqlen
    stride = stride or max(1, window // 2)
    opened.config.check_seqlen(window)
    if not 1 <= stride <= window:
        raise ValueError(f"--stride must lie between 1 and the window of {window} tokens, got {stride}")
    score, waiting = Score(method=f"windows of {window:,} tokens, moved by {stride:,}"), []
    for windows in (windows_of(ids, window, stride) for ids in _encoded(opened, texts, score)):
        for tokens, predicted in windows:
            waiting.append((tokens, predicted))
            if sum(len(tokens) for tokens, _ in waiting) >= _PACK:
                score.nats += _packed_nats(opened, waiting)
                waiting.clear()
    if waiting:
        score.nats += _packed_nats(opened, waiting)
    return _checked(score)


def _packed_nats(opened: TrainedModel, windows: Sequence[tuple[Sequence[int], int]]) -> float:
    lengths = [len(tokens) - 1 for tokens, _ in windows]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    flat = itertools.chain.from_iterable
    read = torch.tensor([list(flat(tokens[:-1] for tokens, _ in windows))], device=opened.device)
    targets = torch.tensor(list(flat(tokens[-predicted:] for tokens, predicted in windows)), device=opened.device)
    ends = bounds[1:].tolist()
    at = flat(range(end - predicted, end) for end, (_, predicted) in zip(ends, windows, strict=True))
    rows = opened.model(
        read,
        cu_seqlens=bounds.to(opened.device),
        max_seqlen=max(lengths),
        select=torch.tensor(list(at), device=opened.device),
        readout=lambda *arguments: row_cross_entropy(*arguments, targets),
    )
    return rows.loss.double().sum().item()


@torch.inference_mode()
def score_with_state(opened: TrainedModel, texts: Iterable[str]) -> Score:
    """Scores as `score_texts` does, but predicts each token from all before it, by states that are carried along."""
    _check_gives_probabilities(opened)
    score = Score(method="state carried through each document")
    for ids in _encoded(opened, texts, score):
        state, row = opened.model.initial_state(1), torch.tensor([ids], device=opened.device)
        for begin in range(0, len(ids) - 1, _CARRIED):
            read = row[:, begin : min(begin + _CARRIED, len(ids) - 1)]
            try:
                logits, state = advance(opened.model, read, state, slice(None))
            except OverflowError as error:  # of layers that remember so many tokens only
                raise ValueError(f"{error}; score the text in windows, without carried state") from None
            targets = row[0, begin + 1 : begin + 1 + read.shape[1]]
            score.nats += F.cross_entropy(logits[0].float(), targets, reduction="none").double().sum().item()
    return _checked(score)


def _encoded(opened: TrainedModel, texts: Iterable[str], score: Score) -> Iterator[list[int]]:
    """Yields the tokens of each text with the one that it starts from, and counts them in `score`."""
    for text in texts:
        ids = opened.reader.tokenizer.encode(text)
        ids = ids if opened.reader.start is None else [opened.reader.start, *ids]
        score.texts += 1
        score.bytes += len(text.encode("utf-8"))
        score.words += len(text.split())
        score.tokens += max(0, len(ids) - 1)
        yield ids


def _check_gives_probabilities(opened: TrainedModel) -> None:
    if not opened.config.causal:
        raise ValueError(
            f"{opened.path} is an {opened.config.architecture}, which gives no text a probability: name a task on "
            "labelled examples, --task"
        )


def _checked(score: Score) -> Score:
    if not score.tokens:
        raise ValueError("there is no text to score: every document is empty, or a single token that nothing precedes")
    return score
