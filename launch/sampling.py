"""Drawing the next token from logits, and turning tokens into text as they come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.8
    """Logits are divided by it; 0 = always the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 = all."""
    top_p: float = 0.95
    """Draw from the likeliest tokens that make up this share of the probability only."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """A token from logits (vocab_size,), which may be -inf; the generator lives on the CPU.

        Temperature comes first, then top_k, then top_p, which always leaves the likeliest token.
        """
        logits = logits.float().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        # At tiny temperatures the quotients would overflow; only differences to the largest matter.
        logits, order = ((logits - logits.max()) / self.temperature).sort(descending=True, stable=True)
        if self.top_k:
            logits, order = logits[: self.top_k], order[: self.top_k]
        probabilities = logits.softmax(0)
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities.where(before < self.top_p, 0.0)
        return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def text_pieces(
    tokens: Iterable[int], decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()
) -> Iterator[str]:
    """The text of tokens, piece by piece as they come, after the tokens `before`.

    A token may hold part of a character only, so text ending in a replacement character waits for the next
    token. Decoding starts a few tokens back, at `anchor`, not at the beginning of the text.
    """
    ids = list(before[-8:])
    anchor, done = 0, len(ids)
    for token in tokens:
        ids.append(token)
        known, text = decode(ids[anchor:done]), decode(ids[anchor:])
        if len(text) > len(known) and not text.endswith("\ufffd"):
            yield text[len(known) :]
            anchor, done = done, len(ids)
    rest = decode(ids[anchor:])[len(decode(ids[anchor:done])) :]
    if rest:
        yield rest
