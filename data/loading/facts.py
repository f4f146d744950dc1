"""What a loader tells of its data besides the batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matmix.data.config import DataConfig

if TYPE_CHECKING:
    import numpy as np

    from matmix.data.tokenizer import Tokenizer


class Facts:
    """What a model, its config and an evaluation need to know of the data. A modality sets what it has, as an attribute
    or a property; the defaults say that there is no such thing."""

    tokenizer: Tokenizer | None = None
    vocab_size: int = 0
    """Number of the tokenizer's ids."""
    token_histogram: np.ndarray | None = None
    """int64 (vocab_size,): how often each id is a target in the training split, in any unit."""
    bytes_per_target: float | None = None
    """UTF-8 bytes of the text for each token that a causal pass over the split predicts."""
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
    token_types: bool = False
    """Batches come with two types of tokens."""

    def fill(self, data: DataConfig) -> DataConfig:
        """Returns `data` with what exports and scores need long after the data, such as names of classes.

        Raises ValueError (one line) where the config names others.
        """
        return data
