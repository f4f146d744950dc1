"""Writes with an encoder that masked diffusion has trained."""

import dataclasses
import re

import torch

from matmix.model.interop.export.unmasking import fill_in
from matmix.use.generation import MASK, Sampling, banned_tokens, read_masks
from matmix.use.opening import TrainedModel

_GAP = re.compile(r"<mask:(\d+)>|_{3,}")
_LONGEST = 1_000_000
"""Tokens of a gap."""


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
    order: str = "random",
    sampling: Sampling | None = None,
    seed: int = 0,
    max_new_tokens: int = 128,
) -> Unmasked:
    """Fills in the gaps of a text in `steps` looks at it; no other token changes. Gaps are <mask>, [MASK], the
    tokenizer's own name of its mask, <mask:N>, which is N of them, and three or more underscores, each a mask.

    order: "random" or "confidence", as `fill_in` says. A text without a gap is followed by `max_new_tokens` masks.
    Raises ValueError (one line) for a model that fills no masks or cannot read so many, steps below 1 and an unknown
    order.
    """
    counts = [int(gap[1] or len(gap[0])) for gap in _GAP.finditer(text)]
    if max(counts, default=0) > _LONGEST:
        raise ValueError(f"a gap of {max(counts):,} tokens is too long; it can have {_LONGEST:,}")
    left = iter(counts)
    ids, places = read_masks(opened, _GAP.sub(lambda _: MASK * next(left), text))
    if not (places or counts):
        ids, places = read_masks(opened, text + MASK * max_new_tokens)
    opened.config.check_seqlen(len(ids))
    sampling, generator = sampling or Sampling(), torch.Generator().manual_seed(seed)
    banned = banned_tokens(opened).cpu()

    def look(asked: list[int]) -> torch.Tensor:
        select = torch.tensor(asked, device=opened.device)
        logits = opened.model(torch.tensor([ids], device=opened.device), select=select)
        return logits.float().cpu().masked_fill(banned, float("-inf"))

    def draw(logits: torch.Tensor) -> torch.Tensor:
        return torch.tensor([sampling.draw(row, generator) for row in logits])

    fill_in(ids, places, look, draw, steps=steps, order=order, generator=generator)
    return Unmasked(opened.reader.marking.decode(ids), [ids[place] for place in places])
