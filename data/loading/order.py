"""Where sample n of the training lies: arithmetic on n, with no state but the number of the next sample.

`Mixture` maps n to a dataset, an epoch of that dataset and a slot in that epoch. Of one dataset with N sequences,
sample n is slot n mod N of epoch n div N. Of several with weights, samples come in periods of P = 65,536, in which
dataset d has c_d places: its share of P by largest remainders (at least one), spread evenly, the k-th at (k + 1/2) /
c_d of the period. So every global batch holds the datasets in the right proportion, and each is read in its own epochs.
An epoch of the mixture is as many samples as the datasets have sequences together. Evaluation takes the datasets one
after another.

`Order` says in which order an epoch reads the documents of a dataset. With shuffling, it permutes the shards, takes
them `shuffle_block` at a time, and permutes the documents in each such block: any moment needs only one block's shards.
Without, it is the order of the files. Empty documents are left out. Each other document counts its tokens plus its
special tokens (prefix, suffix): its *size*.

    epoch:  | block 0                       | block 1              | ...
            | doc doc doc doc doc doc doc   | doc doc doc doc doc  |
    token   0                               token_starts[1]        token_starts[2]     ... token_starts[-1]

Sizes add up to the same total in every epoch: a token's place in it is a plain number.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from matmix.data.config import DataConfig
from matmix.data.loading.rows import Reading
from matmix.data.rng import DOCUMENTS, SHARDS, generator
from matmix.data.splits.reader import TokenShards

_T = TypeVar("_T")


class Recent:
    """The last few values of a function of a key: like `functools.lru_cache`, but left out when pickled."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: OrderedDict[Hashable, object] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = self._values[key] = make()
        if len(self._values) > self.size:
            self._values.popitem(last=False)
        return value

    def __getstate__(self) -> dict:
        return {"size": self.size, "_values": OrderedDict()}


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Where the blocks of an epoch begin. K = number of blocks."""

    shards: np.ndarray  # int64 (n_shards,): shard numbers in the epoch's order
    token_starts: np.ndarray  # int64 (K + 1,): first token of each block, and the total
    document_starts: np.ndarray  # int64 (K + 1,): first document of each block, and the total


@dataclass(frozen=True, slots=True)
class Block:
    """The documents of one block in the epoch's order. n = number of documents."""

    shard: np.ndarray  # int64 (n,)
    index: np.ndarray  # int64 (n,): number inside the shard
    ends: np.ndarray  # int64 (n,): token after the last one of each document, from the block's first token


class Order:
    """The order of one split. extra = special tokens added to each document."""

    def __init__(self, shards: TokenShards, data: DataConfig, reading: Reading, extra: int = 0) -> None:
        self.shards = shards
        self.extra = extra
        self.shuffle, self.seed = reading.shuffles(data), reading.seed
        self.shuffle_block = 1 if data.streams(one_pass=reading.one_pass) else data.shuffle_block
        lengths = [shards.lengths(s) for s in range(shards.n_shards)]
        self._shard_documents = np.array([np.count_nonzero(n) for n in lengths], dtype=np.int64)
        tokens = np.array([n.sum(dtype=np.int64) for n in lengths], dtype=np.int64)
        self._shard_tokens = tokens + extra * self._shard_documents
        self.total_documents = int(self._shard_documents.sum())
        self.total_tokens = int(self._shard_tokens.sum())
        self._plans = Recent(2)
        # Neighbours meet at sequences that cross a border, also between epochs; lanes are all over an epoch.
        self._blocks = Recent(4 + data.carry * reading.global_batch_size)

    def plan(self, epoch: int) -> EpochPlan:
        return self._plans.get(epoch, lambda: self._make_plan(epoch))

    def block(self, epoch: int, number: int) -> Block:
        return self._blocks.get((epoch, number), lambda: self._make_block(epoch, number))

    def place(self, epoch: int, slot: int) -> tuple[Block, int]:
        """Returns the block that holds document `slot` of an epoch, and the number of the document in it."""
        starts = self.plan(epoch).document_starts
        number = int(starts.searchsorted(slot, side="right")) - 1
        return self.block(epoch, number), slot - int(starts[number])

    def _make_plan(self, epoch: int) -> EpochPlan:
        shards = np.arange(self.shards.n_shards)
        if self.shuffle:
            shards = generator(self.seed, epoch, SHARDS, 0).permutation(shards)
        first = np.arange(0, len(shards), self.shuffle_block)

        def starts(per_shard: np.ndarray) -> np.ndarray:
            if len(shards) == 0:
                return np.zeros(1, dtype=np.int64)
            return np.concatenate([[0], np.cumsum(np.add.reduceat(per_shard[shards], first))])

        return EpochPlan(shards, starts(self._shard_tokens), starts(self._shard_documents))

    def _make_block(self, epoch: int, number: int) -> Block:
        members = self.plan(epoch).shards[number * self.shuffle_block : (number + 1) * self.shuffle_block]
        lengths = [self.shards.lengths(s) for s in members.tolist()]
        kept = [np.flatnonzero(n) for n in lengths]
        index = np.concatenate(kept)
        shard = np.repeat(members, [len(k) for k in kept])
        sizes = np.concatenate([n[k] for n, k in zip(lengths, kept, strict=True)]).astype(np.int64) + self.extra
        if self.shuffle:
            order = generator(self.seed, epoch, DOCUMENTS, number).permutation(len(index))
            index, shard, sizes = index[order], shard[order], sizes[order]
        return Block(shard, index, np.cumsum(sizes))


class Streams:
    """The samples of streams, of which each reading process of each rank has one: it alone reads the shards of its
    stream, one after another, epoch after epoch. So the order is another one for each number of ranks and reading
    processes and each size of batches. sizes: sequences in an epoch of each stream."""

    def __init__(self, sizes: Sequence[int], reading: Reading) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.samples_per_epoch = int(self.sizes.sum())
        self.global_batch, self.micro_batch = reading.global_batch_size, reading.micro_batch_size
        self.rank_batch, self.workers = self.global_batch // reading.data_size, len(sizes) // reading.data_size

    def epoch(self, samples: np.ndarray) -> np.ndarray:
        """Returns the epoch of the streams together for each sample number."""
        return samples // self.samples_per_epoch

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (stream, its epoch, slot in that epoch), each int64 (n,), of sample numbers int64 (n,)."""
        batch, place = np.divmod(samples, self.global_batch)
        rank, place = np.divmod(place, self.rank_batch)
        micro, row = np.divmod(place, self.micro_batch)
        # Reading processes take the micro-batches of a rank in turn.
        turn, worker = np.divmod(batch * (self.rank_batch // self.micro_batch) + micro, self.workers)
        stream = rank * self.workers + worker
        return stream, *np.divmod(turn * self.micro_batch + row, self.sizes[stream])


PERIOD = 1 << 16


class Mixture:
    """sizes: sequences in one epoch of each dataset. weights: positive, any scale; None reads all once over."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.samples_per_epoch = int(self.sizes.sum())
        self._ends = np.cumsum(self.sizes)
        self.counts = None
        if weights is not None and len(sizes) > 1:
            self.counts = quotas(weights, PERIOD)
            self._dataset, self._rank = interleave(self.counts)

    def epoch(self, samples: np.ndarray) -> np.ndarray:
        """Returns the epoch of the mixture for each sample number."""
        return samples // self.samples_per_epoch

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (dataset, its epoch, slot in that epoch), each int64 (n,), of sample numbers int64 (n,)."""
        if self.counts is not None:
            period, place = np.divmod(samples, PERIOD)
            dataset = self._dataset[place]
            number = period * self.counts[dataset] + self._rank[place]
            return dataset, *np.divmod(number, self.sizes[dataset])
        epoch, place = np.divmod(samples, self.samples_per_epoch)
        dataset = np.searchsorted(self._ends, place, side="right")
        return dataset, epoch, place - (self._ends - self.sizes)[dataset]


def quotas(weights: Sequence[float], period: int) -> np.ndarray:
    """Returns int64 (n,): shares of `period` in proportion to weights, by largest remainders, each at least 1."""
    shares = np.asarray(weights, dtype=np.float64)
    if len(shares) > period:
        raise ValueError(f"a mixture may have at most {period} datasets, got {len(shares)}")
    exact = shares / shares.sum() * period
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while (missing := period - int(counts.sum())) != 0:
        step = int(np.sign(missing))
        # Give to the one furthest below its share, or take from the one furthest above that can spare one.
        error = np.where(counts + step >= 1, (exact - counts) * step, -np.inf)
        counts[np.argmax(error)] += step
    return counts


def interleave(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Spreads counts[d] places of each dataset d evenly: (dataset at each place, places of it before), int64."""
    dataset = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(c) for c in counts])
    order = np.lexsort((dataset, (2 * rank + 1) / (2 * counts[dataset])))
    return dataset[order], rank[order]
