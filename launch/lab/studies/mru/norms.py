"""Log-norms of states along many tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from matmix.kernels.mru.norms import log_norms


def curve(states: Tensor, tokens: tuple[int, ...]) -> dict[str, list[float | None]]:
    """Largest and mean log-norm over rows and heads at these tokens, counted from 1, of (B, L, H, o, o); None after an
    overflow."""
    norms = log_norms(states[:, torch.tensor(tokens) - 1]).transpose(0, 1).flatten(1)
    there = norms.isfinite().all(1).tolist()
    largest, mean = norms.amax(1).tolist(), norms.mean(1).tolist()
    return {
        "largest": [round(value, 2) if ok else None for value, ok in zip(largest, there, strict=True)],
        "mean": [round(value, 2) if ok else None for value, ok in zip(mean, there, strict=True)],
    }


def overflow(states: Tensor) -> int | None:
    """The first token, counted from 1, at which a state (B, L, H, o, o) is not finite."""
    bad = ~states.isfinite().all(-1).all(-1).all(-1).all(0)
    return int(bad.int().argmax()) + 1 if bad.any() else None
