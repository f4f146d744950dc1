"""Growth: norms along random tokens in layers that were not trained, for elements of several sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from matmix.kernels.mru.constructions import CONSTRUCTIONS
from matmix.kernels.mru.norms import log_norms
from matmix.launch.lab.studies.mru.runs import finite
from matmix.model import initialize
from matmix.model.mixers.mru import MRU, MRUConfig

LENGTH = 8192
"""Tokens along which norms are followed."""

STDS = (0.0, 0.03, 0.1, 0.3)
"""Standard deviations of what a token adds to the elements; it starts at 0 and grows in the first steps."""

WIDTH, ORDER = 192, 8

CASES = {
    f"{construction}, {form}": {"construction": construction, "input": form, "gate": "none", "shift": "none"}
    for construction in CONSTRUCTIONS
    for form in ("dense", "chunked")
}
"""Name -> options of the mixer."""


def curve(states: Tensor, tokens: tuple[int, ...]) -> dict[str, list[float | None]]:
    """Largest and mean log-norm over rows and heads at these tokens, counted from 1, of (B, L, H, o, o); None after an
    overflow."""
    norms = log_norms(states[:, torch.tensor(tokens) - 1]).transpose(0, 1).flatten(1)
    over = {"largest": norms.amax(1), "mean": norms.mean(1)}
    return {name: [finite(value, 2) for value in values.tolist()] for name, values in over.items()}


def overflow(states: Tensor) -> int | None:
    """The first token, counted from 1, at which a state (B, L, H, o, o) is not finite."""
    bad = ~states.isfinite().all(-1).all(-1).all(-1).all(0)
    return int(bad.int().argmax()) + 1 if bad.any() else None


def tokens() -> tuple[int, ...]:
    """Where norms are looked at, counted from 1: four an octave, as growth may take 10 tokens or 10,000."""
    return tuple(sorted({round(2 ** (i / 4)) for i in range(4 * LENGTH.bit_length() - 3)}))


@torch.no_grad()
def growth(options: dict[str, Any]) -> dict[str, Any]:
    """Norms along two rows of normal inputs, for elements of several sizes."""
    layer = MRU(WIDTH, MRUConfig(order=ORDER, **options), causal=True, max_seqlen=LENGTH, output_std=0.02)
    initialize(layer, 0)
    weight = layer.state_up if options["input"] == "chunked" else layer.in_proj.weight
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(weight.shape, generator=generator)
    x = torch.randn(2, LENGTH, WIDTH, generator=generator)
    still = layer.elements(x)  # what they are before a token adds anything
    weight.copy_(direction)
    direction /= (layer.elements(x) - still).std()
    sizes = {}
    for std in STDS:
        weight.copy_(direction * std)
        states, _ = layer.mixed(layer.elements(x))
        sizes[f"{std:g}"] = {**curve(states, tokens()), "overflow": overflow(states)}
    return {"tokens": tokens(), "sizes": sizes}
