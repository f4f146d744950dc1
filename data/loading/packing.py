"""How sequences are cut out of documents: `Packing` turns slot j of an epoch into a row of tokens.

**concat** (`ConcatPacking`). The documents of an epoch (`matmix.data.loading.order`), each with its special tokens,
form one line of T tokens. Window i is the tokens [i S, i S + S) of it, S = seqlen; for causal language models one token
more, which is only the target of the last one. The line has N = floor(T / S), causal floor((T - 1) / S), whole windows.
A window belongs to the block that holds its first token. The windows of a block are permuted, and slot j of the epoch
is the j-th window in that order. Per epoch fewer than S tokens at the very end go unused, in one pass none. With
`data.window` = w S it is windows of w S tokens that are permuted, and slot j is row j mod w of the (j div w)-th.

With `data.carry` there are G = global_batch_size lanes of K windows, K = floor(N / G), in one pass rounded up: slot
b G + j, row j of global batch b, is window j K + b. Row j thus goes on where it ended in the batch before, but at the
beginning of an epoch; fewer than G windows go unused.

**document** (`DocumentPacking`). Slot j is the j-th document of the epoch that is not empty, at most S tokens of it:
causal models get the first S (and the one after as last target), masked ones keep the suffix token at the end, as BERT
does.

**rows** is concat whose rows are handed on without the borders of their documents.

A row is first the documents that lie in it (`Row`), which are known without reading one, and then the tokens of any
stretch of it; whatever lies behind the last document is padding.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from matmix.data.config import DataConfig
from matmix.data.loading.order import Block, Order, Recent
from matmix.data.loading.rows import Reading
from matmix.data.rng import WINDOWS, generator
from matmix.data.splits.reader import TokenShards

Around = tuple[int | None, int | None]
"""Ids of the special tokens before and behind each document; None = there is no such token."""


class Row(NamedTuple):
    """The documents of a row, one after the other."""

    documents: list[tuple[Block, int, int]]
    """Of each its block, its number there, and where it ends, from the first token of the row."""
    count: int
    """How many tokens of the row are no padding."""
    skipped: int = 0
    """Tokens of the first document that lie before the row."""

    @property
    def begins(self) -> list[int]:
        """Where documents begin in the row. (It may itself begin in the middle of one.)"""
        begins = [0, *(end for _, _, end in self.documents[:-1])]
        return begins[self.skipped > 0 or not self.documents :]


class Packing(ABC):
    """Rows of one split.

    lanes: the rows of a global batch, each of which goes on where that of the same number before it ended; 0 = they do
    not. width: tokens in a row, `seqlen` or, if causal, `seqlen + 1` (the last is only a target).
    """

    def __init__(self, shards: TokenShards, data: DataConfig, reading: Reading, causal: bool, around: Around) -> None:
        self.shards, self.seqlen, self.causal = shards, data.seqlen, causal
        self.width = self.seqlen + causal
        self.prefix, self.suffix = around
        self.lanes = data.carry * reading.global_batch_size  # 0 = none
        self.order = Order(shards, data, reading, sum(special is not None for special in around))

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of slots in an epoch."""

    @abstractmethod
    def row(self, epoch: int, slot: int) -> Row:
        """Returns what lies in row `slot` of `epoch`."""

    def read(self, row: Row, start: int, out: np.ndarray) -> int:
        """Writes the tokens of a row from `start` on into int64 (n,), as far as they are no padding; returns how many.
        Raises as `TokenShards.read`."""
        stop = min(start + len(out), row.count)
        begin = -row.skipped
        for block, number, end in row.documents:
            if begin >= stop:
                break
            if end > start:
                at = max(begin, start)
                self._copy(block, number, at - begin, min(end, stop) - at, out[at - start :])
            begin = end
        return max(stop - start, 0)

    def check(self, row: Row) -> None:
        """Raises as `TokenShards.read` where any document of a row cannot be read."""
        for block, number, _ in row.documents:
            shard, index = int(block.shard[number]), int(block.index[number])
            if self.shards.verify:
                self.shards.opened(shard)  # which looks at each of its bytes
            else:
                self.shards.read(shard, index)

    def _copy(self, block: Block, number: int, offset: int, length: int, out: np.ndarray) -> None:
        """Sets out[:length] to elements [offset, offset + length) of a document with its special tokens."""
        text = self.shards.read(int(block.shard[number]), int(block.index[number]))
        lead = self.prefix is not None
        first, last = max(offset, lead), min(offset + length, lead + len(text))
        if last > first:
            out[first - offset : last - offset] = text[first - lead : last - lead]
        if lead and offset == 0:
            out[0] = self.prefix
        if offset + length > lead + len(text):
            assert self.suffix is not None
            out[length - 1] = self.suffix


class ConcatPacking(Packing):
    def __init__(self, shards: TokenShards, data: DataConfig, reading: Reading, causal: bool, around: Around) -> None:
        super().__init__(shards, data, reading, causal, around)
        usable = max(self.order.total_tokens - self.causal, 0)
        up = reading.one_pass
        self._cut = 1 if up else max(data.window, self.seqlen) // self.seqlen  # rows of a window
        self._rows = -(-usable // self.seqlen) if up else usable // (self.seqlen * self._cut) * self._cut
        if self.lanes:
            self._lane = -(-self._rows // self.lanes) if up else self._rows // self.lanes
            self._rows = self._lane * self.lanes
        self._windows, self._permutations = Recent(2), Recent(4)

    def __len__(self) -> int:
        return self._rows

    def row(self, epoch: int, slot: int) -> Row:
        starts = self.order.plan(epoch).token_starts
        first = self._window(epoch, slot, starts) * self.seqlen
        last = min(first + self.width, self.order.total_tokens)
        if last - first <= self.causal:  # behind the end, in a lane that is shorter than the others
            return Row([], 0)
        number = int(starts.searchsorted(first, side="right")) - 1
        documents: list[tuple[Block, int, int]] = []
        while (begin := int(starts[number]) - first) < last - first:
            block = self.order.block(epoch, number)
            one = int(block.ends.searchsorted(-begin, side="right"))
            end = int(block.ends.searchsorted(last - first - begin, side="left"))
            if not documents:
                skipped = -begin - (int(block.ends[one - 1]) if one else 0)
            documents += [
                (block, document, begin + end) for document, end in enumerate(block.ends[one : end + 1].tolist(), one)
            ]
            number += 1
        return Row(documents, last - first, skipped)

    def _window(self, epoch: int, slot: int, starts: np.ndarray) -> int:
        """Returns the number in the line of the row that stands at `slot` in the epoch's order."""
        if self.lanes:
            batch, lane = divmod(slot, self.lanes)
            return lane * self._lane + batch
        if not self.order.shuffle:
            return slot
        slot, piece = divmod(slot, self._cut)
        # The first window of each block.
        size, count = self.seqlen * self._cut, self._rows // self._cut
        windows = self._windows.get(epoch, lambda: np.minimum(-(-starts // size), count))
        block = int(windows.searchsorted(slot, side="right")) - 1
        begin, end = windows[block : block + 2].tolist()
        permutation = self._permutations.get(
            (epoch, block), lambda: generator(self.order.seed, epoch, WINDOWS, block).permutation(end - begin)
        )
        return (begin + int(permutation[slot - begin])) * self._cut + piece


class DocumentPacking(Packing):
    def __len__(self) -> int:
        return self.order.total_documents

    def row(self, epoch: int, slot: int) -> Row:
        block, number = self.order.place(epoch, slot)
        size = int(block.ends[number] - (block.ends[number - 1] if number else 0))
        return Row([(block, number, size)], min(size, self.width))

    def read(self, row: Row, start: int, out: np.ndarray) -> int:
        count = super().read(row, start, out)
        cut = row.documents[0][2] > row.count
        if cut and count and start + count == row.count and not self.causal and self.suffix is not None:
            out[count - 1] = self.suffix
        return count
