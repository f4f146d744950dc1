"""Functions that the Triton kernels of several operations share: numbers of chunks that no boundary of a document
crosses, and a function of single numbers.

Every document starts a chunk of its own, so documents cannot touch each other and states enter and leave at chunk
edges. Document d gets the slots from cu_seqlens[d] // span + d on; as floor(b / s) + 1 >= floor(a / s) + ceil((b - a) /
s), the slots of neighbours never overlap, and total // span + documents slots are enough. Nothing is read back to the
host. A program finds its document by bisection, or reads it from a table where many programs share a slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from matmix.kernels.launching import launch, recording


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


@triton.jit(do_not_specialize=["documents", "slots", "span"])
def fill_table(table, cu_seqlens, documents, slots, span, BLOCK: tl.constexpr):
    """A row of the table for each of BLOCK slots."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros_like(slot)
    high = low + documents
    for _ in range(32):
        # It stands still once `high` is `low + 1`: the first document begins at slot 0.
        middle = (low + high) // 2
        before = tl.load(cu_seqlens + middle).to(tl.int32) // span + middle <= slot
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    begin = tl.load(cu_seqlens + low).to(tl.int32)
    length = tl.load(cu_seqlens + low + 1).to(tl.int32) - begin
    row = table + slot * 4
    tl.store(row, low, mask=slot < slots)
    tl.store(row + 1, slot - begin // span - low, mask=slot < slots)
    tl.store(row + 2, begin, mask=slot < slots)
    tl.store(row + 3, length, mask=slot < slots)


_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def slot_table(rows: int, seqlen: int, cu_seqlens: Tensor | None, span: int) -> Tensor | None:
    """(slots, 4) int32 on the device: document, number of the piece in it, first token and length of the document.

    All layers of a model scan the same packed batch: the table is made once for each tensor of boundaries and span. A
    CUDA graph makes its own, since it may be replayed with other boundaries in the same tensor.
    """
    if cu_seqlens is None:
        return None
    replayed = recording() or (cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing())
    known = {} if replayed else _tables.setdefault(cu_seqlens, {})
    key = span, cu_seqlens._version
    if key not in known:
        slots = count_slots(rows, seqlen, cu_seqlens, span)
        known[key] = torch.empty(slots, 4, dtype=torch.int32, device=cu_seqlens.device)
        grid = (triton.cdiv(slots, 128),)
        launch(fill_table, grid, known[key], cu_seqlens, cu_seqlens.shape[0] - 1, slots, span, num_warps=4, BLOCK=128)
    return known[key]


@triton.jit
def located(slot, table, seqlen, per_row, PACKED: tl.constexpr):
    """`locate`, by the table: number of the piece of tokens in its document, batch row, first token in the row and
    length of the document."""
    if PACKED:
        row = slot * 0
        piece = tl.load(table + slot * 4 + 1)
        begin = tl.load(table + slot * 4 + 2)
        length = tl.load(table + slot * 4 + 3)
    else:
        row = slot // per_row
        piece = slot - row * per_row
        begin = slot * 0
        length = begin + seqlen
    return piece, row, begin, length


@triton.jit
def log_one_plus(x):
    """log(1 + x) for x >= 0, with all digits where x is small."""
    whole = 1.0 + x
    # The rounding of 1 + x is taken back (Kahan).
    return tl.where(whole == 1.0, x, tl.log(whole) * (x / tl.where(whole == 1.0, 1.0, whole - 1.0)))
