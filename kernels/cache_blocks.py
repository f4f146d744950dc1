"""Cuts elementwise work into pieces that fit into the cache of a CPU core."""

from __future__ import annotations

import torch


def cache_blocks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Slices over `rows` rows of `width` numbers: about 256 kB each on a CPU, one slice on other devices."""
    step = max(1, (1 << 16) // max(width, 1)) if device.type == "cpu" else max(rows, 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
