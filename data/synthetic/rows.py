"""Micro-batches of a task, made from the numbers of their samples.

Sample n of a split is a function of the task, the length, the seed and n: its draws come from a generator keyed by them
(`matmix.data.rng`), training and validation from different ones. So the batches depend neither on ranks nor on workers,
and the position in the data is one number, as for prepared data.
"""

import numpy as np
from torch.utils.data import Dataset

from matmix.data.loading.batch import Batch, row_batch
from matmix.data.loading.masking import IGNORED
from matmix.data.rng import GENERATED_TRAINING, GENERATED_VALIDATION, generator
from matmix.data.synthetic.task import Task

_FOR_EVER = 1 << 62


class TaskRows(Dataset):
    """As `MicroBatches`: an item is a whole micro-batch, and numbers at or above `limit` give rows of padding."""

    def __init__(
        self, task: Task, seqlen: int, *, seed: int, split: str, pad_id: int, mask_id: int | None, limit: int | None
    ) -> None:
        """mask_id: for the bidirectional form; None = the causal one."""
        self.task = task
        self.seqlen = seqlen
        self.seed = seed
        self.stream = GENERATED_TRAINING if split == "train" else GENERATED_VALIDATION
        self.pad_id = pad_id
        self.mask_id = mask_id
        self.limit = limit

    @property
    def samples_per_epoch(self) -> int:
        return _FOR_EVER if self.limit is None else self.limit

    def __getitems__(self, samples: list[int]) -> Batch:
        shape = len(samples), self.seqlen
        ids, labels = np.full(shape, self.pad_id, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        for row, sample in enumerate(samples):
            if self.limit is None or sample < self.limit:
                self.task.fill(generator(self.seed, 0, self.stream, sample), ids[row], labels[row], self.mask_id)
        tokens = int((ids != self.pad_id).sum())
        return row_batch(ids, labels, n_tokens=tokens, causal=self.mask_id is None)
