"""Generates text: continues prompts with a language model, and fills in the masks of a text with an encoder."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from tqdm import tqdm

from matmix.data.artifacts import errors_in_one_line
from matmix.model.decoding import decode
from matmix.model.interop.export.unmasking import check_temperature, draw_token
from matmix.use.opening import TrainedModel

MASK = "<mask>"
_BERTS = "[MASK]"
_CANDIDATES = 5
"""Tokens that are told for each mask."""
_NO_TOKEN = -1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Draws tokens from logits, by temperature, top_k and top_p."""

    temperature: float = 0.8
    """Logits are divided by it; 0 = always the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 = all."""
    top_p: float = 0.95
    """Draw from the likeliest tokens that make up this share of the probability only."""

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Draws a token from logits (vocab_size,), as `draw_token` says."""
        return draw_token(logits, generator, self.temperature, self.top_k, self.top_p)


class TextStream:
    """Turns tokens into text as they come, up to a stop string.

    A token may hold part of a character only, so text ending in a replacement character waits for the next token, and
    text that may be the beginning of a stop string waits until it is one or is none. Decoding starts a few tokens back,
    at `_anchor`, not at the beginning of the text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        """decode: text of token ids; before: the tokens that come before the text; stop: strings, not empty, that end
        the text and are not part of it."""
        self._decode, self._stop = decode, tuple(stop)
        self._ids = list(before[-8:])
        self._anchor, self._done = 0, len(self._ids)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that has come."""

    def push(self, token: int) -> str:
        """Returns the text that is certain now that one more token has come."""
        self._ids.append(token)
        new = self._undecided()
        if not new or new.endswith("\ufffd"):
            return ""
        self._anchor, self._done = self._done, len(self._ids)
        return self._let_out(new)

    def close(self) -> str:
        """Returns the text that is left when no more tokens come."""
        return "" if self.stopped_by is not None else self._let_out(self._undecided()) + self._take_held()

    def _undecided(self) -> str:
        known = self._decode(self._ids[self._anchor : self._done])
        return self._decode(self._ids[self._anchor :])[len(known) :]

    def _let_out(self, more: str) -> str:
        text = self._take_held() + more
        stops = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if stops:
            place, self.stopped_by = min(stops)
            return text[:place]
        longest = max(map(len, self._stop), default=1)
        begun = range(max(0, len(text) - longest + 1), len(text))
        cut = next((at for at in begun if any(stop.startswith(text[at:]) for stop in self._stop)), len(text))
        self._held = text[cut:]
        return text[:cut]

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held


@dataclasses.dataclass(slots=True)
class Continuation:
    """The text that a model wrote after a prompt."""

    text: str = ""
    """The text up to the stop string, without it."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """All that were drawn, those of a stop string too, but not the end token."""
    finish_reason: Literal["length", "eos_token", "stop_sequence"] = "length"
    """The number of tokens was reached, the model ended the document, or a stop string came."""
    stop: str | None = None
    """The stop string that came."""
    logprob: float = 0.0
    """Sum over `tokens` of the natural logarithm of their probabilities, before temperature, top_k and top_p."""


@torch.inference_mode()
def generate(
    opened: TrainedModel,
    prompts: Sequence[str] = ("",),
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    show: Callable[[str], object] | None = None,
) -> list[Continuation]:
    """Continues several prompts with a language model, as one batch; each ends early where the model ends the document.

    Each continuation is what its prompt gets alone with the same seed, up to rounding. A state is carried from token to
    token, so a token costs the same however long the text is (except for attention layers).

    prompts: an empty one starts as a document starts; seeds: one for each prompt, default: 0; stop: strings that end a
    text; show: takes the text of a single prompt piece by piece, as it comes (else a terminal shows a bar). Raises
    ValueError (one line) for a model that writes no text, where there is neither a prompt nor a token to start from,
    and where the states of an MRU do not stay finite.
    """
    reader = opened.reader
    check_writes(opened)
    sampling = sampling or Sampling()
    ids = [reader.ids(prompt) or ([] if reader.start is None else [reader.start]) for prompt in prompts]
    if not all(ids):
        raise ValueError("this tokenizer has no token that starts a text; give a --prompt")
    continuations = [Continuation() for _ in prompts]
    streams = [TextStream(reader.marking.decode, before, stop) for before in ids]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or [0] * len(ids)]
    eos, banned = reader.special.get("eos"), banned_tokens(opened).cpu()
    if eos is not None:
        banned[eos] = False
    end = _NO_TOKEN if eos is None else eos

    def draw(number: int, logits: torch.Tensor) -> int:
        text = continuations[number]
        if text.stop is not None:
            return end
        token = sampling.draw(logits.masked_fill(banned, float("-inf")), generators[number])
        if token == end:
            text.finish_reason = "eos_token"
        else:
            text.logprob += float(logits.float().log_softmax(-1)[token])
        return token

    def add(number: int, piece: str) -> None:
        text = continuations[number]
        text.text, text.stop = text.text + piece, streams[number].stopped_by
        if text.stop is not None:
            text.finish_reason = "stop_sequence"
        if show is not None and piece:
            show(piece)

    try:
        steps = decode(opened.model, ids, draw, max_new_tokens=max_new_tokens, end=end)
        hidden = None if show is None else True
        for new in tqdm(steps, desc="generating", total=max_new_tokens, unit="token", leave=False, disable=hidden):
            for number, token in new.items():
                continuations[number].tokens.append(token)
                add(number, streams[number].push(token))
    except OverflowError as error:
        raise ValueError(str(error)) from None
    for number, stream in enumerate(streams):
        add(number, stream.close())
    return continuations


def check_writes(opened: TrainedModel) -> None:
    """Raises ValueError (one line) for a model that is no language model."""
    kind = opened.config.model_class
    if not kind.causal or kind.takes_head or kind.separated:
        raise ValueError(f"{opened.path} is a {opened.config.architecture}, which writes no text")


def banned_tokens(opened: TrainedModel) -> torch.Tensor:
    """Marks the tokens that are never generated, special ones and ids that the tokenizer lacks: (vocab_size,) bool."""
    known = opened.reader.marking.get_vocab_size()
    banned = torch.arange(opened.config.vocab_size, device=opened.device) >= known
    banned[[index for index in opened.reader.special.values() if index is not None]] = True
    return banned


@dataclasses.dataclass(frozen=True, slots=True)
class Filled:
    """A text with words for its masks."""

    text: str
    """The text with the likeliest token in the place of each mask."""
    masks: list[list[tuple[str, float]]]
    """For each mask the likeliest tokens and their probabilities, the likeliest first."""

    def __str__(self) -> str:
        lines = []
        for number, candidates in enumerate(self.masks, 1):
            lines.append(f"{MASK} {number} of {len(self.masks)}:")
            lines += [f"  {probability:6.1%}  {token!r}" for token, probability in candidates]
        return "\n".join([*lines, self.text, ""])


def read_masks(opened: TrainedModel, text: str) -> tuple[list[int], list[int]]:
    """Returns the tokens of a text with <mask>, [MASK] or the tokenizer's own name of it, as an encoder reads them, and
    the places of the masks. Raises ValueError (one line) for a model that fills no masks."""
    tokenizer, mask = opened.reader.marking, opened.reader.special.get("mask")
    if opened.config.causal or opened.config.model_class.takes_head:
        raise ValueError(f"{opened.path} is a {opened.config.architecture}, which fills no masks")
    if mask is None:
        raise ValueError(f"{opened.path} is an encoder, and its tokenizer has no mask token to fill in")
    own = tokenizer.id_to_token(mask)
    with errors_in_one_line(Exception):  # the library raises plain Exception
        ids = tokenizer.encode(text.replace(_BERTS, own).replace(MASK, own)).ids
    return ids, [place for place, index in enumerate(ids) if index == mask]


@torch.inference_mode()
def fill_masks(opened: TrainedModel, text: str) -> Filled:
    """Finds the likeliest tokens for each <mask> of a text with an encoder. Raises ValueError where there is none."""
    tokenizer = opened.reader.marking
    ids, places = read_masks(opened, text)
    if not places:
        raise ValueError(f"{opened.path} is an encoder, which fills in words: put {MASK} where the prompt lacks one")
    select = torch.tensor(places, device=opened.device)
    logits = opened.model(torch.tensor([ids], device=opened.device), select=select)
    probabilities = logits.float().softmax(-1).masked_fill(banned_tokens(opened), 0.0)
    likeliest, masks = probabilities.topk(min(_CANDIDATES, probabilities.shape[-1])), []
    for place, shares, tokens in zip(places, likeliest.values.tolist(), likeliest.indices.tolist(), strict=True):
        masks.append([(tokenizer.decode([token]), share) for token, share in zip(tokens, shares, strict=True)])
        ids[place] = tokens[0]
    return Filled(tokenizer.decode(ids), masks)
