"""Rows, which make micro-batches in the reading processes, and facts about the data: what a loader is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from matmix.data.artifacts import panics_as_errors
from matmix.data.config import DataConfig
from matmix.data.storage.remote import RemoteError

if TYPE_CHECKING:
    from matmix.data.loading.batch import Batch
    from matmix.data.tokenizer import Tokenizer


class Part(NamedTuple):
    """One of several equal parts of the tokens of a micro-batch, counted row after row. By default there is one."""

    number: int = 0
    parts: int = 1

    def span(self, tokens: int) -> tuple[int, int]:
        """Returns which of so many tokens it has, a multiple of the parts: the first, and the one behind the last."""
        length, rest = divmod(tokens, self.parts)
        assert not rest
        return self.number * length, (self.number + 1) * length

    def pieces(self, rows: int, seqlen: int) -> Iterator[tuple[int, int, int]]:
        """Yields what it has of rows of so many tokens: the number of a row, and its first and last + 1 token here."""
        first, last = self.span(rows * seqlen)
        for row in range(first // seqlen, -(-last // seqlen)):
            begin = row * seqlen
            yield row, max(first - begin, 0), min(last - begin, seqlen)


WHOLE = Part()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The way a split is read."""

    split: str = "train"
    seed: int = 0
    one_pass: bool = False
    """Read the split once, in order; else for ever, epoch after epoch."""
    global_batch_size: int = 1
    """Samples in one optimizer step over all ranks."""
    micro_batch_size: int = 1
    data_size: int = 1
    """Ranks that have samples of their own."""
    part: Part = WHOLE
    """What is made of each micro-batch."""
    tokenizer_sha256: str | None = None
    """Refuse data made with another tokenizer than this; None = any."""

    def shuffles(self, data: DataConfig) -> bool:
        """Returns True where each epoch has an order of its own."""
        return data.shuffle and not self.one_pass

    def streams(self, data: DataConfig) -> int:
        """Returns the number of reading processes of all ranks; with a library as `data.reader` each has a stream."""
        return self.data_size * max(data.workers, 1)

    def reader(self, data: DataConfig) -> dict[str, Any]:
        """Returns what the order of the streams depends on, which a saved position belongs to: JSON values."""
        sizes = {name: getattr(self, name) for name in ("global_batch_size", "micro_batch_size")}
        return {"name": data.reader, "ranks": self.data_size, "workers": max(data.workers, 1), **sizes}


class Failure:
    """An error of the data on its way from a worker: torch would wrap it into a page of traceback."""

    def __init__(self, error: Exception) -> None:
        kinds = (FileNotFoundError, RemoteError, ValueError)
        self.kind = next((kind for kind in kinds if isinstance(error, kind)), OSError)
        self.message = str(error)


Cursor = tuple[int, int, int, int]
"""Where a stream goes on that has no numbers of samples: its epoch, which of its shards, the sample there, and how many
tokens of that are used up."""


class Numbers(list):
    """The numbers of the samples of a micro-batch. begin: the stream that it is read from, and where that goes on, if
    the reading process cannot know."""

    begin: tuple[int, Cursor] | None = None


class Rows(Protocol):
    """Makes micro-batches from the numbers of their samples, which count up over all epochs. Rows of streams that have
    cursors in their place have an attribute `streams`, how many there are, and a `cursor` in every batch."""

    limit: int | None
    """Samples of one pass; None = without end. Higher numbers give rows of padding without targets."""

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in an epoch; None = there are no epochs."""

    def __getitems__(self, samples: list[int]) -> Batch | Failure: ...


_Rows = TypeVar("_Rows")
_Read = Callable[[_Rows, list[int]], "Batch | Failure"]


def errors_as_failures(read: _Read) -> _Read:
    """Decorates `Rows.__getitems__`, which then returns errors of the data as a Failure."""

    @functools.wraps(read)
    def wrapped(rows: _Rows, samples: list[int]) -> Batch | Failure:
        try:
            with panics_as_errors():
                return read(rows, samples)
        except (ValueError, OSError) as error:
            return Failure(error)

    return wrapped


class Facts:
    """The facts that a model, its config and an evaluation need to know of the data, as attributes or properties that a
    modality sets; the defaults say that there is no such thing."""

    inputs: str = "tokens"
    """What a model reads, by the word that `Architecture.inputs` has for it."""
    tokenizer: Tokenizer | None = None
    vocab_size: int = 0
    """Number of the tokenizer's ids."""
    token_histogram: np.ndarray | None = None
    """int64 (vocab_size,): how often each id is a target in the training split, in any unit."""
    bytes_per_target: float | None = None
    """UTF-8 bytes of the text for each token that a causal pass over the split predicts."""
    bytes_per_token: float | None = None
    """UTF-8 bytes of the text of the split for each of its own tokens, without those that are put around documents."""
    outputs: int | None = None
    """Number of classes or values that a classifier predicts for each sample."""
    outputs_words: str = ""
    """A clause that says how many these are, for messages."""
    classes: tuple[str, ...] = ()
    """Names in the order of the outputs."""
    class_counts: np.ndarray | None = None
    """int64 (classes,): samples of each class in the split."""
    chance_accuracy: float | None = None
    """Accuracy of the best constant guess of a token, where guesses are scored."""
    not_promised: str = ""
    """What does not hold of data that is read in this way, in one line."""
    token_types: bool = False
    """Batches come with two types of tokens."""

    def fill(self, data: DataConfig) -> DataConfig:
        """Returns `data` with what exports and scores need long after the data, such as names of classes. Raises
        ValueError (one line) where the config names others."""
        return data


class Opened(NamedTuple):
    """A split that is ready to be read."""

    rows: Rows
    facts: Facts
    fingerprint: dict[str, Any]
    """The data that a saved position belongs to: JSON values."""
