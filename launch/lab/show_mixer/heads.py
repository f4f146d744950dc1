"""Which of a layer's matrices are drawn, and what they are called."""

from __future__ import annotations

import torch

from matmix.model.mixers.base import Mixer


def choose_heads(matrices: torch.Tensor, most: int, word: str = "head") -> list[tuple[int, str]]:
    """Which of the matrices (H, L, L) to draw, at most `most` of them and evenly spaced, and what to call them.

    word: what has a matrix of its own. Where the first half of them looks back and the second one ahead, each has two.
    """
    count, half = len(matrices), len(matrices) // 2
    past, future = matrices[:half], matrices[half:]
    paired = count % 2 == 0 and matrices.dim() == 3 and not past.triu(1).any() and not future.tril(-1).any()
    if not paired or not past.tril(-1).any() or not future.triu(1).any():
        return [(index, f"{word} {index}") for index in _evenly(count, most)]
    return [
        (index + back * half, f"{word} {index}, {'backward' if back else 'forward'}")
        for index in _evenly(half, max(most // 2, 1))
        for back in (0, 1)
    ]


def _evenly(count: int, most: int) -> list[int]:
    number = min(count, most)
    return [index * count // number for index in range(number)]


def is_per_channel(mixer: Mixer, matrices: torch.Tensor) -> bool:
    """Whether every channel of the values has a matrix of its own, of the matrices (H, L, L)."""
    if len(matrices) != mixer.d_model:
        return False
    values = mixer.values(next(mixer.parameters()).new_zeros(1, matrices.shape[1], mixer.d_model))
    return values.shape[2:] == (mixer.d_model, 1)
