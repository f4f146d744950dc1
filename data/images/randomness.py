"""Random numbers of libraries that draw from the global generators of Python, numpy and torch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def borrowed_generators() -> Iterator[None]:
    """Gives the global generators (on the CPU) back as they were: a reading process may be the training process."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_generators(source: np.random.Generator) -> None:
    """Sets all three to what the next number of `source` says."""
    seed = int(source.integers(1 << 63))
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs as well
