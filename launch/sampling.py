"""Drawing the next token from logits, and turning tokens into text as they come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

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


class TextStream:
    """The text of tokens as they come, up to a stop string.

    A token may hold part of a character only, so text ending in a replacement character waits for the next token, and
    text that may be the beginning of a stop string waits until it is one or is none. Decoding starts a few tokens back,
    at `_anchor`, not at the beginning of the text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        """
        Args:
            decode: text of token ids.
            before: the tokens that come before the text.
            stop: strings, not empty, that end the text; they are not part of it.
        """
        self._decode, self._stop = decode, tuple(stop)
        self._ids = list(before[-8:])
        self._anchor, self._done = 0, len(self._ids)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that has come."""

    def push(self, token: int) -> str:
        """The text that is certain now that one more token has come."""
        self._ids.append(token)
        known, text = self._decode(self._ids[self._anchor : self._done]), self._decode(self._ids[self._anchor :])
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return ""
        self._anchor, self._done = self._done, len(self._ids)
        return self._let_out(text[len(known) :])

    def close(self) -> str:
        """What is left when no more tokens come."""
        if self.stopped_by is not None:
            return ""
        known, text = self._decode(self._ids[self._anchor : self._done]), self._decode(self._ids[self._anchor :])
        return self._let_out(text[len(known) :]) + self._take_held()

    def _let_out(self, more: str) -> str:
        text = self._take_held() + more
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, self.stopped_by = min(found)
            return text[:place]
        longest = max(map(len, self._stop), default=1)
        begun = range(max(0, len(text) - longest + 1), len(text))
        cut = next((at for at in begun if any(stop.startswith(text[at:]) for stop in self._stop)), len(text))
        self._held = text[cut:]
        return text[:cut]

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held
