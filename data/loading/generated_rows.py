"""Micro-batches of generated samples, made from the numbers of their samples.

Sample n of a split is a function of its source, the length, the seed and n: its draws come from a generator keyed by
them (`matmix.data.rng`), training and validation from different ones. So the batches depend neither on ranks nor on
workers, and the position in the data is one number, as for prepared data.
"""

from torch.utils.data import Dataset

from matmix.data.loading.batch import Batch, row_batch
from matmix.data.rng import GENERATED_TRAINING, GENERATED_VALIDATION, generator
from matmix.data.synthetic.task import GeneratedSamples

_FOR_EVER = 1 << 62


class GeneratedRows(Dataset):
    """As `MicroBatches`: an item is a whole micro-batch, and numbers at or above `limit` give rows of padding."""

    def __init__(
        self, task: GeneratedSamples, seqlen: int, *, seed: int, split: str, causal: bool, limit: int | None
    ) -> None:
        self.task = task
        self.seqlen = seqlen
        self.seed = seed
        self.stream = GENERATED_TRAINING if split == "train" else GENERATED_VALIDATION
        self.causal = causal
        self.limit = limit

    @property
    def samples_per_epoch(self) -> int:
        return _FOR_EVER if self.limit is None else self.limit

    def __getitems__(self, samples: list[int]) -> Batch:
        inputs, labels = self.task.padding(len(samples), self.seqlen)
        mask, n_tokens = None if self.causal else self.task.mask_id, 0
        for row, sample in enumerate(samples):
            if self.limit is None or sample < self.limit:
                self.task.fill(generator(self.seed, 0, self.stream, sample), inputs[row], labels[row], mask)
                n_tokens += self.task.count(inputs[row])
        return row_batch(inputs, labels, n_tokens=n_tokens, causal=self.causal)
