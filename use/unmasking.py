"""Writes with an encoder that masked diffusion has trained: fills in masks, some at each look at the text."""

import dataclasses
import re
from typing import Literal, get_args

import torch

from matmix.use.generation import MASK, Sampling, banned_tokens, read_masks
from matmix.use.opening import TrainedModel

Order = Literal["random", "confidence"]
_GAP = re.compile(r"<mask:(\d+)>")


@dataclasses.dataclass(frozen=True, slots=True)
class Unmasked:
    """A text whose masks were filled in."""

    text: str
    """The whole text."""
    tokens: list[int]
    """Ids in the places of the masks, in the order of the text."""


@torch.inference_mode()
def unmask(
    opened: TrainedModel,
    text: str = "",
    *,
    steps: int = 64,
    order: Order = "random",
    sampling: Sampling | None = None,
    seed: int = 0,
    max_new_tokens: int = 128,
) -> Unmasked:
    """Fills in each <mask> of a text, and <mask:N>, which is N of them, in `steps` looks at it; no other token changes.

    Each look draws tokens for an equal share of the masks that are left. With the order "random", temperature 1 and
    top_p 1 that is the process that the bound of masked diffusion is about (arXiv 2406.07524); "confidence" draws for
    all masks and keeps the draws that have the highest probability (LLaDA, arXiv 2502.09992). A text without a mask is
    followed by `max_new_tokens` of them. Raises ValueError (one line) for a model that fills no masks.
    """
    if order not in get_args(Order):
        raise ValueError(f"order must be one of {', '.join(get_args(Order))}, got {order!r}")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    if not _GAP.search(text) and MASK not in text:
        text += MASK * max_new_tokens
    ids, places = read_masks(opened, _GAP.sub(lambda gap: MASK * int(gap[1]), text))
    opened.config.check_seqlen(len(ids))
    sampling, generator = sampling or Sampling(), torch.Generator().manual_seed(seed)
    banned = banned_tokens(opened).cpu()
    left = [places[index] for index in torch.randperm(len(places), generator=generator).tolist()]
    for looks in range(min(steps, len(left)), 0, -1):
        count = -(-len(left) // looks)
        asked = left[:count] if order == "random" else left
        select = torch.tensor(asked, device=opened.device)
        logits = opened.model(torch.tensor([ids], device=opened.device), select=select).float().cpu()
        logits = logits.masked_fill(banned, float("-inf"))
        drawn = torch.tensor([sampling.draw(row, generator) for row in logits])
        sure = logits.log_softmax(1).gather(1, drawn[:, None])[:, 0]
        kept = sure.sort(descending=True, stable=True).indices[:count].tolist()
        for index in kept:
            ids[asked[index]] = int(drawn[index])
        filled = {asked[index] for index in kept}
        left = [place for place in left if place not in filled]
    return Unmasked(opened.reader.marking.decode(ids), [ids[place] for place in places])
