"""From labelled examples to micro-batches: the same sequence of global batches on any ranks and workers.

Sample n of the training split is example p[n mod N] of epoch n div N, where p is a permutation of the N examples drawn
from (seed, epoch). Evaluation reads them in order, and fills the last global batch with ones without number or label.
"""

from collections.abc import Sequence

import numpy as np
import torch

from matmix.data.config import DataConfig
from matmix.data.examples.base import Example, Examples
from matmix.data.loading.batch import Batch, packed_batch
from matmix.data.loading.order import Recent
from matmix.data.loading.rows import Failure, Reading, errors_as_failures
from matmix.data.rng import EXAMPLES, generator


class ExampleRows:
    """`Rows` of labelled examples. token_types: batches come with them."""

    def __init__(self, examples: Examples, data: DataConfig, reading: Reading, *, token_types: bool) -> None:
        self.examples, self.packing, self.seqlen = examples, data.packing, data.seqlen
        self.seed, self.shuffle, self.token_types = reading.seed, reading.shuffles(data), token_types
        self.limit = len(examples) if reading.one_pass else None
        self._permutations = Recent(2)

    @property
    def samples_per_epoch(self) -> int:
        return len(self.examples)

    def example_of(self, sample: int) -> int:
        """Returns the number of the example that is sample `sample`; -1 = it fills up the last batch."""
        if self.limit is not None and sample >= self.limit:
            return -1
        count = len(self.examples)
        epoch, slot = divmod(sample, count)
        if not self.shuffle:
            return slot
        order = self._permutations.get(epoch, lambda: generator(self.seed, epoch, EXAMPLES, 0).permutation(count))
        return int(order[slot])

    @errors_as_failures
    def __getitems__(self, samples: list[int]) -> Batch | Failure:
        numbers = [self.example_of(sample) for sample in samples]
        chosen = [None if number < 0 else self.examples[number] for number in numbers]
        return self._batch(chosen, numbers)

    def _batch(self, chosen: Sequence[Example | None], numbers: Sequence[int]) -> Batch:
        examples, concat = self.examples, self.packing == "concat"
        filler = Example((examples.encoder.padding,) * examples.documents, examples.nothing)
        documents = [document for example in chosen for document in (example or filler).documents]
        lengths = np.array([len(document.ids) for document in documents])
        counts = lengths.sum(keepdims=True) if concat else lengths
        width = self.seqlen if self.packing == "rows" else int(counts.max())
        starts = np.append(0, lengths.cumsum())[:-1] if concat else np.arange(len(documents)) * width
        ids = np.full((len(counts), width), examples.encoder.pad_id, np.int64)
        types, begins = np.zeros_like(ids), np.zeros(ids.shape, bool)
        begins.flat[starts] = True
        for start, document in zip(starts, documents, strict=True):
            place = slice(start, start + len(document.ids))
            ids.reshape(-1)[place], types.reshape(-1)[place] = document.ids, document.types
        labels, owners, select = _targets(chosen, numbers, starts[:: examples.documents], examples)
        batch = packed_batch(ids, labels, begins, counts, self.packing)
        batch.n_tokens = sum(len(document.ids) for example in chosen if example for document in example.documents)
        batch.select, batch.examples = select, torch.from_numpy(owners)
        if self.token_types:
            batch.extra["token_type_ids"] = torch.from_numpy(types)
        return batch


def _targets(
    chosen: Sequence[Example | None], numbers: Sequence[int], starts: np.ndarray, examples: Examples
) -> tuple[np.ndarray, np.ndarray, torch.Tensor | None]:
    """Returns the labels, the example of each output, and the positions of the outputs, where these count."""
    nothing = examples.nothing
    if not examples.by_position:
        labels = [nothing if example is None else example.labels for example in chosen]
        return np.concatenate(labels), np.repeat(np.array(numbers, np.int64), examples.documents), None
    real = [(example, number, start) for example, number, start in zip(chosen, numbers, starts, strict=True) if example]
    labels = [nothing[:0], *(example.labels for example, _, _ in real)]
    counts = [len(example.positions) for example, _, _ in real]
    owners = np.repeat(np.array([number for _, number, _ in real], np.int64), counts)
    positions = [np.zeros(0, np.int64), *(start + example.positions for example, _, start in real)]
    return np.concatenate(labels), owners, torch.from_numpy(np.concatenate(positions))
