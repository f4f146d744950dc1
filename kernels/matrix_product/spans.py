"""Cuts a sequence of matrices into chunks that are multiplied side by side, a few steps at a time."""

import itertools
import math

import torch
from torch import Tensor

from matmix.kernels.functions import working_dtype

COLUMNS = 32
"""Columns of a wide product. Multiplying two small matrices is nearly all overhead; as many matrices side by side as
make up this many columns take little longer than one."""

ORDERS = (4, 8, 16, 32)
"""Orders of matrices that the op takes: those there are kernels for."""

STEPS_AT_ONCE = 4
"""Steps whose matrices are copied together into a buffer, or more to make a wide product: few enough to stay small."""


def chunk_length(seqlen: int, chunk_size: int | None) -> int:
    """As wished, or about the square root of the length: as many steps inside chunks as there are chunks to scan."""
    chunk = chunk_size or 1
    while chunk_size is None and 2 * chunk * chunk < seqlen:
        chunk *= 2
    return min(chunk, seqlen)


def multiplies_wide(x: Tensor) -> bool:
    """Whether products inside chunks are kept, and multiplied side by side. Large matrices gain nothing by it."""
    return x.shape[-1] < 16


def products_like(x: Tensor, chunk_size: int | None, context: str = "") -> Tensor:
    """An empty tensor for the products that `product_forward` returns for x.

    Wide: one matrix per token, its product since the chunk's start. In memory: spans, blocks of steps, then (lanes, o,
    steps of the block, o), so that a block's matrices lie side by side. Else one per chunk of several chunks, or of all
    chunks where ranks share the rows.
    """
    if multiplies_wide(x):
        return x.new_empty(x.numel(), dtype=working_dtype(x))
    count, left = divmod(x.shape[1], chunk_length(x.shape[1], chunk_size))
    count += left > 0 if context else 0
    shape = (x.shape[0], count, *x.shape[2:]) if count > 1 or context else (0,)
    return x.new_empty(shape, dtype=working_dtype(x))


class ProductDocuments:
    """The boundaries of packed documents within `seqlen` tokens, on the host; none without `cu_seqlens`."""

    def __init__(self, cu_seqlens: Tensor | None, seqlen: int):
        bounds = [] if cu_seqlens is None else cu_seqlens.tolist()
        within = itertools.pairwise(min(max(bound, 0), seqlen) for bound in bounds)
        pairs = list(enumerate(within))
        self.firsts = [(start, document) for document, (start, end) in pairs if end > start]
        self.starts = [(start, document) for start, document in self.firsts if bounds[document] >= 0]
        """Without a document that comes from another rank."""
        self.ends = [(end - 1, document) for document, (start, end) in pairs if end > start]
        self.empty = [document for document, (start, end) in pairs if end == start]


class ProductSpan:
    """`count` chunks of `chunk` tokens from token `offset` on, behind `before` others. Lanes: (batch, count, nheads).

    `starts` and `ends`: step -> (chunks, documents) of the documents that begin or end there; `cut`: for each chunk in
    which one begins, the step where the first one does. Steps are taken in blocks of `width`.
    """

    def __init__(self, x: Tensor, documents: ProductDocuments, offset: int, count: int, chunk: int, before: int = 0):
        self.tokens = slice(offset, offset + count * chunk)
        self.before, self.count, self.chunk = before, count, chunk
        self.dtype, self.device = working_dtype(x), x.device
        self.x = self.view(x)
        self.lanes = (x.shape[0], count, *x.shape[2:])
        self.flat = (x.shape[0] * count * x.shape[2], *x.shape[3:])
        self.starts, self.ends = self.at_steps(documents.starts), self.at_steps(documents.ends)
        self.cut: dict[int, int] = {}
        for step in sorted(self.starts):
            for row in self.starts[step][0].tolist():
                self.cut.setdefault(row, step)
        self.width = min(max(STEPS_AT_ONCE, COLUMNS // x.shape[-1]), chunk)

    def view(self, x: Tensor) -> Tensor:
        """(batch, seqlen, ...) -> (batch, count, chunk, ...), the span's tokens."""
        return x[:, self.tokens].unflatten(1, (self.count, self.chunk))

    def at_steps(self, tokens: list[tuple[int, int]]) -> dict[int, tuple[Tensor, Tensor]]:
        by_step: dict[int, tuple[list[int], list[int]]] = {}
        for token, document in tokens:
            if self.tokens.start <= token < self.tokens.stop:
                row, step = divmod(token - self.tokens.start, self.chunk)
                rows, documents = by_step.setdefault(step, ([], []))
                rows.append(row)
                documents.append(document)
        return {
            step: tuple(torch.tensor(index, device=self.device) for index in pair) for step, pair in by_step.items()
        }

    def blocks(self) -> list[range]:
        """The steps, a few at a time."""
        starts = range(0, self.chunk, self.width)
        return [range(start, min(start + self.width, self.chunk)) for start in starts]

    def buffer(self, steps: int | None = None) -> Tensor:
        """One matrix per lane, (batch, count, nheads, o, o), or several with a leading dimension of steps."""
        shape = self.lanes if steps is None else (steps, *self.lanes)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def buffers(self) -> Tensor:
        return self.buffer(self.width)

    def wide(self, flat: Tensor, block: range) -> Tensor:
        """The part of `products_like` that holds a block: (batch, count, nheads, o, steps, o), side by side."""
        size = math.prod(self.lanes)
        per_token = size // self.count
        start = self.tokens.start * per_token + block.start * size
        shape = (*self.lanes[:-1], len(block), self.lanes[-1])
        return flat[start : start + len(block) * size].view(shape)

    def of_chunks(self, products: Tensor) -> Tensor:
        """The part of `products_like` that holds one product a chunk: (batch, count, nheads, o, o)."""
        return products[:, self.before : self.before + self.count]

    def restarted(self, block: range) -> tuple[Tensor, Tensor] | None:
        """(chunks, steps of the block) that no state reaches from another chunk: a document begins before or there."""
        if not self.cut:
            return None
        firsts = torch.tensor([self.cut.get(row, self.chunk) for row in range(self.count)])
        places = (firsts[:, None] <= torch.arange(block.start, block.stop)).nonzero()
        return places[:, 0].to(self.device), places[:, 1].to(self.device)

    def load(self, source: Tensor, first: int, last: int, out: Tensor) -> Tensor:
        """Copy steps first .. last - 1 of (batch, count, chunk, nheads, o, o) into `out`, steps leading."""
        return out[: last - first].copy_(source[:, :, first:last].permute(2, 0, 1, 3, 4, 5))

    def store(self, buffer: Tensor, target: Tensor, first: int) -> None:
        """The inverse of `load`."""
        target[:, :, first : first + buffer.shape[0]] = buffer.permute(1, 2, 0, 3, 4, 5)

    def by_lane(self, x: Tensor) -> tuple[Tensor, ...]:
        """(steps, *lanes) -> for each step (lanes, o, o), a view to multiply with."""
        return x.flatten(1, 3).unbind(0)

    def rows(self, x: Tensor) -> Tensor:
        """One step as (lanes, o, o) -> (chunks, nheads, o, o), a view; packed documents have batch 1."""
        return x.view(self.lanes)[0]

    def chunk_major(self, x: Tensor) -> tuple[Tensor, ...]:
        """(batch, count, nheads, o, o) -> for each chunk (batch * nheads, o, o), a copy."""
        return x.transpose(0, 1).contiguous().flatten(1, 2).unbind(0)

    def lane_major(self, chunks: list[Tensor]) -> Tensor:
        """The inverse of `chunk_major`."""
        batch, _, heads = self.lanes[:3]
        return torch.stack(chunks).unflatten(1, (batch, heads)).transpose(0, 1).contiguous()


def product_spans(x: Tensor, chunk_size: int | None, documents: ProductDocuments) -> list[ProductSpan]:
    """Whole chunks first, then what is left at the end as one short chunk."""
    seqlen = x.shape[1]
    chunk = chunk_length(seqlen, chunk_size)
    count, left = divmod(seqlen, chunk)
    spans = [ProductSpan(x, documents, 0, count, chunk)]
    if left:
        spans.append(ProductSpan(x, documents, seqlen - left, 1, left, count))
    return spans
