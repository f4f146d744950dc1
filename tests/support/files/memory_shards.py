"""Shards of documents that lie in memory."""

import numpy as np


class MemoryShards:
    """What Order and Packing use of TokenShards. Token values tell the document and the place in it."""

    def __init__(self, lengths: list[list[int]]) -> None:
        self._lengths = [np.array(n, dtype=np.uint32) for n in lengths]
        self.n_shards = len(lengths)

    def lengths(self, shard: int) -> np.ndarray:
        return self._lengths[shard]

    def read(self, shard: int, index: int) -> np.ndarray:
        return 10_000 * (1 + shard) + 100 * index + np.arange(self._lengths[shard][index]) % 100
