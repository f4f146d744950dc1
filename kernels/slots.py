"""Numbers chunks so that none crosses the boundary of a document, for the kernels of all scans.

Every document starts a chunk of its own, so documents cannot touch each other and states enter and leave at chunk
edges. Packed documents need no table for that. Document d gets the slots from cu_seqlens[d] // span + d on; as
floor(b / s) + 1 >= floor(a / s) + ceil((b - a) / s), the slots of neighbours never overlap, and
total // span + documents slots are enough. A program finds its document by bisection, so nothing is read back to the
host and nothing is prepared by another kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def count_documents(rows: int, cu_seqlens: Tensor | None) -> int:
    """Documents of a batch of `rows` rows: the rows themselves where nothing is packed."""
    return rows if cu_seqlens is None else cu_seqlens.shape[0] - 1


def count_slots(rows: int, seqlen: int, cu_seqlens: Tensor | None, span: int) -> int:
    """Pieces of `span` tokens, or a bound of their number where documents are packed."""
    if cu_seqlens is None:
        return rows * -(-seqlen // span)
    return seqlen // span + count_documents(rows, cu_seqlens)


@triton.jit
def first_slot(document, begin, per_row, span, PACKED: tl.constexpr):
    """Slot of a document's first piece."""
    return begin // span + document if PACKED else document * per_row


@triton.jit
def bounds(document, cu_seqlens, seqlen, PACKED: tl.constexpr):
    """First token of a document in its row, and its length."""
    if PACKED:
        begin = tl.load(cu_seqlens + document).to(tl.int32)
        length = tl.load(cu_seqlens + document + 1).to(tl.int32) - begin
    else:
        begin = document * 0
        length = begin + seqlen
    return begin, length


@triton.jit
def locate(slot, cu_seqlens, documents, seqlen, per_row, span, PACKED: tl.constexpr):
    """Document, number of the piece of `span` tokens in it, batch row, first token in the row and length of the
    document; a slot that belongs to nobody gets a piece beyond the document's end."""
    if PACKED:
        low = slot * 0
        high = low + documents
        while high - low > 1:
            middle = (low + high) // 2
            first = tl.load(cu_seqlens + middle).to(tl.int32) // span + middle
            low = tl.where(first <= slot, middle, low)
            high = tl.where(first <= slot, high, middle)
        document = low
        begin, length = bounds(document, cu_seqlens, seqlen, PACKED)
        piece = slot - first_slot(document, begin, per_row, span, PACKED)
        row = low * 0
    else:
        # Written out with `slot`: the compiler then needs a few registers less.
        document = slot // per_row
        piece = slot - document * per_row
        row = document
        begin = slot * 0
        length = begin + seqlen
    return document, piece, row, begin, length
