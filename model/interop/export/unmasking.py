"""Fills in the masks of a text, some at each look at it: how an encoder writes that masked diffusion has trained."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

ORDERS = ("random", "confidence")


def check_temperature(temperature: float) -> None:
    """Raises ValueError (one line) for what logits cannot be divided by."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 or more and finite, got {temperature}")


def draw_token(logits: Tensor, generator: torch.Generator, temperature: float, top_k: int, top_p: float) -> int:
    """Draws a token from logits (vocab_size,), which may be -inf; the generator lives on the CPU. Temperature comes
    first (0 = always the likeliest), then top_k (0 = all), then top_p, which always leaves the likeliest token."""
    check_temperature(temperature)
    logits = logits.float().cpu()
    if temperature == 0:
        return int(logits.argmax())
    # At tiny temperatures the quotients would overflow; only differences to the largest matter.
    logits, order = ((logits - logits.max()) / temperature).sort(descending=True, stable=True)
    if top_k:
        logits, order = logits[:top_k], order[:top_k]
    probabilities = logits.softmax(0)
    before = probabilities.cumsum(0) - probabilities
    probabilities = probabilities.where(before < top_p, 0.0)
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def fill_in(
    ids: list[int],
    places: list[int],
    look: Callable[[list[int]], Tensor],
    draw: Callable[[Tensor], Tensor],
    *,
    steps: int,
    order: str,
    generator: torch.Generator,
) -> None:
    """Writes tokens into the places of `ids`, in `steps` looks; no other place changes.

    Each look draws tokens for an equal share of the places that are left. With the order "random" and draws from the
    model as it is, that is the process that the bound of masked diffusion is about (MDLM, arXiv 2406.07524);
    "confidence" draws for all places and keeps the draws of the highest probability (LLaDA, arXiv 2502.09992).

    look: logits (n, vocab_size) on the CPU of some places of `ids` as they stand, -inf = never; draw: a token for each
    row of logits, int64 (n,). Raises ValueError (one line) for steps below 1 and an unknown order.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    left = [places[index] for index in torch.randperm(len(places), generator=generator).tolist()]
    for looks in range(min(steps, len(left)), 0, -1):
        count = -(-len(left) // looks)
        asked = left[:count] if order == "random" else left
        logits = look(asked)
        drawn = draw(logits)
        sure = logits.log_softmax(1).gather(1, drawn[:, None])[:, 0]
        kept = sure.sort(descending=True, stable=True).indices[:count].tolist()
        for index in kept:
            ids[asked[index]] = int(drawn[index])
        filled = {asked[index] for index in kept}
        left = [place for place in left if place not in filled]
