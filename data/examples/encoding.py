"""From texts to the tokens that a model reads: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from matmix.data.tokenizer import Tokenizer


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
        """The tokens of each text, without special ones."""
        return self.tokenizer.encode_batch(list(texts))

    def words(self, words: Sequence[str], *, first: bool = True) -> list[list[int]]:
        """The tokens of each word of a text, of which there may be none. first: the text begins with them."""
        return self.tokens([word if first and number == 0 else f" {word}" for number, word in enumerate(words)])

    def document(self, parts: Sequence[Sequence[int]], where: str) -> Document:
        """One or two texts with their special tokens; `where` names them in errors.

        Raises ValueError (one line) where they are too long and not to be cut.
        """
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
    """Lengths cut until their sum is at most `room`, always the longest one first, of equals the last."""
    lengths = list(lengths)
    while (over := sum(lengths) - room) > 0:
        longest = max(range(len(lengths)), key=lambda i: (lengths[i], i))
        others = [length for i, length in enumerate(lengths) if i != longest]
        lengths[longest] -= min(over, max(1, lengths[longest] - max(others, default=0)))
    return lengths
