"""What a loader tells about its data besides the batches."""

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from matmix.data.arrays import read_vector
from matmix.data.config import DataConfig
from matmix.data.loading.loader_parts import load_tokenizer
from matmix.data.splits.reader import TokenShards
from matmix.data.synthetic.task import GeneratedSamples

if TYPE_CHECKING:
    from matmix.data.synthetic.vocabulary import TaskTokenizer
    from matmix.data.tokenizer import Tokenizer


class PreparedFacts:
    """Facts about prepared datasets (several of a mixture), from their manifests."""

    def __init__(self, shards: list[TokenShards], config: DataConfig) -> None:
        self.shards = shards
        self.config = config

    @property
    def vocab_size(self) -> int:
        return self.shards[0].manifest.tokenizer.vocab_size

    @property
    def bytes_per_target(self) -> float:
        """UTF-8 bytes of the text for each token that a causal pass over the split predicts: bits per byte = loss in
        nats per token / ln 2 / this. Special tokens around a document are predicted, its very first token is not."""
        extra = (self.config.prefix != "none") + (self.config.suffix != "none") - 1
        targets = sum(s.info.tokens + extra * s.info.documents for s in self.shards)
        return sum(s.info.bytes for s in self.shards) / max(1, targets)

    @property
    def token_histogram(self) -> np.ndarray:
        """int64 (vocab_size,): how often each id occurs in the training split (all datasets of a mixture)."""
        return np.sum([_histogram(s) for s in self.shards], axis=0)

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self.shards[0])


def _histogram(shards: TokenShards) -> np.ndarray:
    name, where = shards.manifest.token_histogram, shards.storage.path
    counts = read_vector(
        shards.storage.file(name), "int64", f"{where}: {name}", length=shards.manifest.tokenizer.vocab_size
    )
    if len(counts) and counts.min() < 0:
        raise ValueError(f"{where}: {name} has negative counts")
    return counts


class GeneratedFacts:
    """Facts about generated samples."""

    bytes_per_target = None

    def __init__(self, task: GeneratedSamples, seqlen: int) -> None:
        self.task = task
        self.seqlen = seqlen

    @property
    def vocab_size(self) -> int:
        """0 where the inputs are no tokens."""
        return 0 if self.tokenizer is None else self.tokenizer.vocab_size

    @cached_property
    def token_histogram(self) -> np.ndarray | None:
        """int64 (vocab_size,): how often each id is an answer, in any unit; None where the inputs are no tokens."""
        if self.tokenizer is None:
            return None
        counts = self.task.answer_counts(self.seqlen)
        return np.pad(counts, (0, self.vocab_size - len(counts)))

    @cached_property
    def tokenizer(self) -> "TaskTokenizer | None":
        """None where the inputs are no tokens."""
        if not self.task.tokens:
            return None
        from matmix.data.synthetic.vocabulary import TaskTokenizer

        return TaskTokenizer(self.task)


class DataFacts(Protocol):
    """What a loader knows about data of any kind; None where there is no such thing."""

    bytes_per_target: float | None

    @property
    def vocab_size(self) -> int: ...

    @property
    def token_histogram(self) -> np.ndarray | None: ...

    @property
    def tokenizer(self) -> "Tokenizer | TaskTokenizer | None": ...
