"""How sequences are cut out of documents: `Packing` turns slot j of an epoch into a row of tokens.

**concat** (`ConcatPacking`). The documents of an epoch (`matmix.data.loading.order`), each with its special tokens,
form one line of T tokens. Window i is the tokens [i S, i S + S) of it, S = seqlen; for causal language models one token
more, which is only the target of the last one. The line has N = floor(T / S), causal floor((T - 1) / S), whole windows.
A window belongs to the block that holds its first token. The windows of a block are permuted, and slot j of the epoch
is the j-th window in that order. Per epoch fewer than S tokens at the very end go unused, in one pass none.

**document** (`DocumentPacking`). Slot j is the j-th document of the epoch that is not empty, at most S tokens of it:
causal models get the first S (and the one after as last target), masked ones keep the suffix token at the end, as BERT
does.

**rows** is concat whose rows are handed on without the borders of their documents.

A row comes as tokens, marks of the positions where a document begins (a window may begin in the middle of one), and the
number of real tokens; whatever lies behind those is padding.
"""

from abc import ABC, abstractmethod

import numpy as np

from matmix.data.config import DataConfig
from matmix.data.loading.order import Block, Order, Recent
from matmix.data.loading.rows import Reading
from matmix.data.rng import WINDOWS, generator
from matmix.data.splits.reader import TokenShards

Around = tuple[int | None, int | None]
"""Ids of the special tokens before and behind each document; None = there is no such token."""


class Packing(ABC):
    """Rows of one split.

    width: tokens in a row, `seqlen` or, if causal, `seqlen + 1` (the last is only a target).
    """

    def __init__(self, shards: TokenShards, data: DataConfig, reading: Reading, causal: bool, around: Around) -> None:
        self.shards, self.seqlen, self.causal = shards, data.seqlen, causal
        self.width = self.seqlen + causal
        self.prefix, self.suffix = around
        self.order = Order(shards, data, reading, sum(special is not None for special in around))

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of slots in an epoch."""

    @abstractmethod
    def fill(self, epoch: int, slot: int, tokens: np.ndarray, begins: np.ndarray) -> int:
        """Writes row `slot` of `epoch` into tokens int64 (width,), marks beginnings of documents in begins bool
        (width,), and returns how many tokens are real. Raises as `TokenShards.read`."""

    def _copy(self, block: Block, number: int, offset: int, length: int, out: np.ndarray, *, at: int = 0) -> None:
        """Sets out[at : at + length] to elements [offset, offset + length) of a document with its special tokens."""
        text = self.shards.read(int(block.shard[number]), int(block.index[number]))
        lead = self.prefix is not None
        first, last = max(offset, lead), min(offset + length, lead + len(text))
        if last > first:
            out[at + first - offset : at + last - offset] = text[first - lead : last - lead]
        if lead and offset == 0 and length:
            out[at] = self.prefix
        if offset + length > lead + len(text):
            assert self.suffix is not None
            out[at + length - 1] = self.suffix


class ConcatPacking(Packing):
    def __init__(self, shards: TokenShards, data: DataConfig, reading: Reading, causal: bool, around: Around) -> None:
        super().__init__(shards, data, reading, causal, around)
        usable = max(self.order.total_tokens - self.causal, 0)
        self._rows = -(-usable // self.seqlen) if reading.one_pass else usable // self.seqlen
        self._windows, self._permutations = Recent(2), Recent(4)

    def __len__(self) -> int:
        return self._rows

    def fill(self, epoch: int, slot: int, tokens: np.ndarray, begins: np.ndarray) -> int:
        starts = self.order.plan(epoch).token_starts
        first = self._window(epoch, slot, starts) * self.seqlen
        count = min(self.width, self.order.total_tokens - first)
        block = int(starts.searchsorted(first, side="right")) - 1
        done = 0
        while done < count:
            offset = first + done - int(starts[block])
            done += self._fill_from(self.order.block(epoch, block), offset, count - done, tokens, begins, done)
            block += 1
        return count

    def _window(self, epoch: int, slot: int, starts: np.ndarray) -> int:
        """Returns the window that stands at `slot` in the epoch's order."""
        if not self.order.shuffle:
            return slot
        # The first window of each block.
        windows = self._windows.get(epoch, lambda: np.minimum(-(-starts // self.seqlen), self._rows))
        block = int(windows.searchsorted(slot, side="right")) - 1
        begin, end = windows[block : block + 2].tolist()
        permutation = self._permutations.get(
            (epoch, block), lambda: generator(self.order.seed, epoch, WINDOWS, block).permutation(end - begin)
        )
        return begin + int(permutation[slot - begin])

    def _fill_from(self, block: Block, offset: int, limit: int, tokens: np.ndarray, begins: np.ndarray, at: int) -> int:
        """Copies up to `limit` tokens from token `offset` of a block to position `at`; returns how many."""
        number = first = int(block.ends.searchsorted(offset, side="right"))
        last = int(block.ends.searchsorted(offset + limit, side="left"))
        ends = block.ends[first : last + 1].tolist()
        begin = int(block.ends[first - 1]) if first else 0
        done = 0
        for end in ends:
            length = min(end - begin, offset + limit - begin) - (skip := max(offset - begin, 0))
            self._copy(block, number, skip, length, tokens, at=at + done)
            if skip == 0:
                begins[at + done] = True
            done += length
            number, begin = number + 1, end
        return done


class DocumentPacking(Packing):
    def __len__(self) -> int:
        return self.order.total_documents

    def fill(self, epoch: int, slot: int, tokens: np.ndarray, begins: np.ndarray) -> int:
        block, number = self.order.place(epoch, slot)
        size = int(block.ends[number] - (block.ends[number - 1] if number else 0))
        count = min(size, self.width)
        self._copy(block, number, 0, count, tokens)
        if not self.causal and size > count and self.suffix is not None:
            tokens[count - 1] = self.suffix
        begins[0] = True
        return count
