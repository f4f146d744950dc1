"""AdamW with moments of 8 bits, in blocks that small matrices have, several in each of their rows."""

from __future__ import annotations

from matmix.train.optim import adamw_8bit


class AdamW8bit(adamw_8bit.AdamW8bit):
    smallest = 100
    block_sizes = (4, 8)
