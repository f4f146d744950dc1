"""Fills in the <mask> of texts with an encoder that was read from a run or an export."""

from __future__ import annotations

import dataclasses

import torch

from matmix.data.artifacts import errors_in_one_line
from matmix.launch.continuation import banned_tokens
from matmix.launch.loading import Source

MASK = "<mask>"
CANDIDATES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Filled:
    """A prompt with words for its masks."""

    text: str
    """The prompt with the likeliest token in the place of each mask."""
    masks: list[list[tuple[str, float]]]
    """Of each mask the likeliest tokens and their probabilities, the likeliest first."""

    def __str__(self) -> str:
        lines = []
        for number, candidates in enumerate(self.masks, 1):
            lines.append(f"{MASK} {number} of {len(self.masks)}:")
            lines += [f"  {probability:6.1%}  {token!r}" for token, probability in candidates]
        return "\n".join([*lines, self.text, ""])


@torch.inference_mode()
def fill_masks(source: Source, prompt: str) -> Filled:
    """The likeliest tokens for each <mask> of the prompt. Raises ValueError where there is none."""
    mask = source.special.get("mask")
    if mask is None:
        raise ValueError(f"{source.path} is an encoder, and its tokenizer has no mask token to fill in")
    # Whatever the tokenizer calls its mask, <mask> means it.
    with errors_in_one_line(Exception):  # the library raises plain Exception
        ids = source.tokenizer.encode(prompt.replace(MASK, source.tokenizer.id_to_token(mask))).ids
    places = [place for place, index in enumerate(ids) if index == mask]
    if not places:
        raise ValueError(f"{source.path} is an encoder, which fills in words: put {MASK} where the prompt lacks one")
    select = torch.tensor(places, device=source.device)
    logits = source.model(torch.tensor([ids], device=source.device), select=select)
    probabilities = logits.float().softmax(-1).masked_fill(banned_tokens(source), 0.0)
    masks = []
    for place, row in zip(places, probabilities, strict=True):
        values, tokens = (found.tolist() for found in row.topk(min(CANDIDATES, row.numel())))
        masks.append([(source.tokenizer.decode([token]), value) for token, value in zip(tokens, values, strict=True)])
        ids[place] = tokens[0]
    return Filled(source.tokenizer.decode(ids), masks)
