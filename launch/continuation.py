"""Continues prompts with a language model that was read from a run or an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from tqdm import tqdm

from matmix.launch.loading import Source
from matmix.launch.sampling import Sampling, TextStream
from matmix.model.decoding import decode

_NO_TOKEN = -1


@dataclasses.dataclass(slots=True)
class Continuation:
    """What a model wrote after a prompt."""

    text: str = ""
    """Up to the stop string, without it."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """All that were drawn, those of a stop string too, but not the end token."""
    finish_reason: Literal["length", "eos_token", "stop_sequence"] = "length"
    """The number of tokens was reached, the model ended the document, or a stop string came."""
    stop: str | None = None
    """The stop string that came."""
    logprob: float = 0.0
    """Sum over `tokens` of the natural logarithm of their probabilities, before temperature, top_k and top_p."""


@torch.inference_mode()
def continue_texts(
    source: Source,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    show: Callable[[str], object] | None = None,
) -> list[Continuation]:
    """The continuations of several prompts, drawn as one batch; each ends early where the model ends the document.

    Each is what its prompt gets alone with the same seed, up to rounding. A state is carried from token to token, so a
    token costs the same however long the text is (but for attention layers).

    Args:
        seeds: one of each prompt; default: 0.
        stop: strings that end a text.
        show: takes the text of a single prompt piece by piece, as it comes; without it a terminal shows a bar.

    Raises ValueError (one line) where there is neither a prompt nor a token to start from, and where the states of an
    MRU do not stay finite.
    """
    ids = [_prompt_ids(source, prompt) for prompt in prompts]
    found = [Continuation() for _ in prompts]
    streams = [TextStream(source.tokenizer.decode, before, stop) for before in ids]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or [0] * len(ids)]
    eos, banned = source.special.get("eos"), banned_tokens(source).cpu()
    if eos is not None:
        banned[eos] = False
    end = _NO_TOKEN if eos is None else eos

    def draw(number: int, logits: torch.Tensor) -> int:
        one = found[number]
        if one.stop is not None:
            return end
        token = sampling.draw(logits.masked_fill(banned, float("-inf")), generators[number])
        if token == end:
            one.finish_reason = "eos_token"
        else:
            one.logprob += float(logits.float().log_softmax(-1)[token])
        return token

    def add(number: int, text: str) -> None:
        one = found[number]
        one.text, one.stop = one.text + text, streams[number].stopped_by
        if one.stop is not None:
            one.finish_reason = "stop_sequence"
        if show is not None and text:
            show(text)

    try:
        steps = decode(source.model, ids, draw, max_new_tokens=max_new_tokens, end=end)
        hidden = None if show is None else True
        for new in tqdm(steps, desc="generating", total=max_new_tokens, unit="token", leave=False, disable=hidden):
            for number, token in new.items():
                found[number].tokens.append(token)
                add(number, streams[number].push(token))
    except OverflowError as error:
        raise ValueError(str(error)) from None
    for number, stream in enumerate(streams):
        add(number, stream.close())
    return found


def banned_tokens(source: Source) -> torch.Tensor:
    """(vocab_size,) bool: special tokens, and rows of the vocabulary that no token of the tokenizer has."""
    known = source.tokenizer.get_vocab_size()
    banned = torch.arange(source.model.config.vocab_size, device=source.device) >= known
    banned[[index for index in source.special.values() if index is not None]] = True
    return banned


def _prompt_ids(source: Source, prompt: str) -> list[int]:
    ids = source.reader.ids(prompt)
    if not ids and source.start is None:
        raise ValueError("this tokenizer has no token that starts a text; give a --prompt")
    return ids or [source.start]
