"""Masked-language-model batches: which positions are predicted, and what the model sees there.

BERT's rule (Devlin et al. 2018, section 3.1) with the rate left open: each ordinary token of a sample is chosen with
`probability`; of the chosen ones `mask_share` are replaced by the mask token, `random_share` by a token drawn from the
ordinary vocabulary, and the rest are left as they are. The draws of a sample come from a generator keyed by (seed,
epoch, sample), three numbers for each position in order, so nothing else changes them.

With a `span` above 1 runs of consecutive tokens are chosen, as in SpanBERT (Joshi et al. 2019, arXiv 1907.10529), and
what they become is decided once for each run. `find_spans` says where they are.

For masked diffusion every sample has a rate of its own instead, which its (seed, number) decides.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from matmix.data.config import check_limits
from matmix.data.rng import MASKS, RATES, generator

if TYPE_CHECKING:
    from matmix.data.tokenizer import Tokenizer

_GOLDEN = 0x9E3779B97F4A7C15  # (sqrt(5) - 1) / 2 as a fraction of 2^64
IGNORED = -100
"""Label of a position that is not predicted (the `ignore_index` of torch's cross-entropy)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingConfig:
    weighted: ClassVar[bool] = False
    """Whether predictions of a sample weigh more where fewer of its tokens are chosen."""

    probability: float = 0.30
    """Share of the ordinary tokens that are chosen for prediction."""
    mask_share: float = 0.8
    """Share of the chosen tokens that become the mask token."""
    random_share: float = 0.1
    """Share of the chosen tokens that become a random ordinary token; the rest stay as they are."""
    span: int = 1
    """Consecutive tokens that are chosen together; between two such spans at least one token is left. No span goes
    from one document into the next."""
    span_lengths: Literal["fixed", "geometric"] = "fixed"
    """fixed: spans of `span` tokens; geometric: of 1, 2, 3, ... tokens, and `span` in the mean."""

    def __post_init__(self) -> None:
        shares = [(name, 0 <= getattr(self, name) <= 1, "between 0 and 1") for name in ("mask_share", "random_share")]
        spans = ("span", self.span >= 1, "at least 1")
        limits = [("probability", 0 < self.probability <= 1, "above 0 and at most 1"), *shares, spans]
        check_limits(self, limits, "masking ")
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"masking mask_share + random_share must be at most 1, got {self.mask_share} + {self.random_share}"
            )
        if self.span > 1 and self.probability * (self.span + 1) > self.span:
            most = f"{self.span}/{self.span + 1} of the tokens"
            raise ValueError(
                f"masking probability = {self.probability} is too much for spans of {self.span} with a token between "
                f"them, which hold at most {most}; lower it, or set span = 1"
            )

    def rate(self, seed: int, sample: int) -> float:
        """Returns the share of a sample's ordinary tokens that are chosen."""
        return self.probability


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionMasking(MaskingConfig):
    """Masks as of masked diffusion (MDLM, arXiv 2406.07524; LLaDA, arXiv 2502.09992): the rate t of a sample is uniform
    in (0, 1], each of its ordinary tokens becomes the mask token with that probability, and a prediction weighs 1/t.

    The rates are a Weyl sequence, the multiples of the golden ratio modulo 1 from where the seed says: any samples that
    follow each other, which are those of a batch and of an evaluation, have rates spread evenly.
    """

    weighted: ClassVar[bool] = True

    probability: float = 0.5
    mask_share: float = 1.0
    random_share: float = 0.0
    least: float = 1e-3
    """Rates below it are raised to it, so that no weight is above 1 / least. What the mean then bounds is the
    likelihood of texts whose last tokens, this share, are drawn at once."""

    def rate(self, seed: int, sample: int) -> float:
        return max(1 - ((_first_rate(seed) + sample * _GOLDEN) % (1 << 64)) / (1 << 64), self.least)


@functools.cache
def _first_rate(seed: int) -> int:
    """Returns where the rates of a seed begin, as a fraction of 2^64."""
    return int(generator(seed, 0, RATES, 0).integers(1 << 64, dtype=np.uint64))


def find_spans(draws: np.ndarray, begins: Sequence[int], config: MaskingConfig) -> list[tuple[int, int]]:
    """Returns the spans of a sample: the first token of each, and the one behind its last. draws: float64 (n,), uniform
    in [0, 1), of its tokens from the first on. begins: where documents begin.

    A document is a Markov chain from left to right. Outside of spans each token begins one with the probability
    h = p / (S (1 - p)), S = `span` and p = `probability`, at which a token lies in a span with the probability p. The
    chain begins as if it had always gone on: with the probability p in a span, with any number of its tokens left. So
    spans at the borders of a document may be shorter, and tokens there are chosen no less than others.
    """
    span, rate, found = config.span, config.probability, []
    opens = np.append(np.flatnonzero(draws < rate / (span * (1 - rate))), len(draws))
    closes = np.append(np.flatnonzero(draws < 1 / span), len(draws)) if config.span_lengths == "geometric" else None
    for at, end in itertools.pairwise(sorted({0, *(one for one in begins if one < len(draws)), len(draws)})):
        inside = draws[at] < rate
        left = min(int(draws[at] / rate * span) + 1, span)
        while at < end:
            if inside:
                stop = at + left if closes is None else _next(closes, at)
                found.append((at, min(stop, end)))
                at = stop
            else:
                at, left = _next(opens, at), span
            inside = not inside
    return found


def _next(places: np.ndarray, at: int) -> int:
    return int(places[np.searchsorted(places, at, side="right")])


class Stretch(NamedTuple):
    """Consecutive tokens of a sample."""

    place: Any
    """Where they are among the tokens that are masked: an index."""
    epoch: int
    sample: int
    start: int = 0
    """Which token of the sample the first of them is."""
    begins: Sequence[int] = ()
    """Which tokens of the sample documents begin with."""


class Masker:
    """Applies a `MaskingConfig` to whole micro-batches of tokens, or to parts. tokenizer: has a mask token."""

    def __init__(self, config: MaskingConfig, tokenizer: Tokenizer, seed: int) -> None:
        mask_id, vocab_size, special_ids = tokenizer.special["mask"], tokenizer.vocab_size, tokenizer.silent_ids
        if not 0 <= mask_id < vocab_size:
            raise ValueError(f"the mask token has id {mask_id}, outside the vocabulary of {vocab_size}")
        self.config, self.seed, self.mask_id = config, seed, mask_id
        self.ordinary_ids = tokenizer.ordinary_ids()
        if config.random_share > 0 and len(self.ordinary_ids) == 0:
            raise ValueError("masking with random replacements needs a vocabulary with ordinary (not special) tokens")
        self.choosable = np.ones(vocab_size, dtype=bool)
        self.choosable[[i for i in special_ids if 0 <= i < vocab_size]] = False
        self.choosable[mask_id] = False

    def apply(self, tokens: np.ndarray, stretches: Iterable[Stretch]) -> tuple[np.ndarray, np.ndarray]:
        """Masks tokens, int64 of any shape; stretches: all that are no padding. Returns (input_ids, labels), both int64
        of the same shape; labels are `IGNORED` where nothing is predicted."""
        random_at = self.config.mask_share + self.config.random_share
        draws = np.ones((*tokens.shape, 3))  # 1.0 is never chosen: the draws lie in [0, 1)
        chosen_at = np.zeros(tokens.shape)
        for place, epoch, sample, start, begins in stretches:
            if self.config.span > 1:
                draws[place] = self._span_draws(epoch, sample, start, len(draws[place]), begins)
                chosen_at[place] = 0.5
                continue
            generator(self.seed, epoch, MASKS, sample, skip=3 * start).random(out=draws[place])
            chosen_at[place] = self.config.rate(self.seed, sample)
        chosen = np.nonzero((draws[..., 0] < chosen_at) & self.choosable[tokens])
        originals, action, pick = tokens[chosen], draws[chosen][:, 1], draws[chosen][:, 2]
        random_ids = originals
        if len(self.ordinary_ids):
            random_ids = self.ordinary_ids[(pick * len(self.ordinary_ids)).astype(np.int64)]
        seen = np.where(action < random_at, random_ids, originals)
        seen = np.where(action < self.config.mask_share, self.mask_id, seen)
        input_ids, labels = tokens.copy(), np.full_like(tokens, IGNORED)
        input_ids[chosen] = seen
        labels[chosen] = originals
        return input_ids, labels

    def _span_draws(self, epoch: int, sample: int, start: int, count: int, begins: Sequence[int]) -> np.ndarray:
        """Returns the draws of `apply`, (count, 3), with 0 or 1 in place of the first: in a span or not, and of a span
        the second of its first token. They are made from the sample's first token on, on which spans depend."""
        draws = generator(self.seed, epoch, MASKS, sample).random((start + count, 3))
        spans = find_spans(draws[:, 0], begins, self.config)
        draws[:, 0] = 1
        for first, end in spans:
            draws[first:end, 0], draws[first:end, 1] = 0, draws[first, 1]
        return draws[start:]

    def weights(self, tokens: np.ndarray, stretches: Iterable[Stretch]) -> np.ndarray:
        """Returns what predictions weigh, float32 of the shape of tokens: 1 / rate of the sample at all tokens that may
        be chosen, so that the weights of those that are have the count of tokens as their mean; 0 elsewhere."""
        weights = np.zeros(tokens.shape, dtype=np.float32)
        for place, _, sample, *_ in stretches:
            weights[place] = 1 / self.config.rate(self.seed, sample)
        return weights * self.choosable[tokens]
