"""What all scan kernels share: where a program's chunk lies, and the decays inside it.

Chunks never cross a document: every document starts a chunk of its own, so documents cannot touch each other
and states enter and leave at chunk edges. Packed documents need no table for that. Document d gets the slots from
cu_seqlens[d] // span + d on; as floor(b / s) + 1 >= floor(a / s) + ceil((b - a) / s), the slots of neighbours
never overlap, and total // span + documents slots are enough. A program finds its document by bisection, so
nothing is read back to the host and nothing is prepared by another kernel.

Exponents are sums of log-decays in units of log 2, added in float64 and split into two float32 numbers: a
difference of two long sums of strong decays, rounded once, would lose the weak decays between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-151.0)
"""2 to this power is 0 in float32; a bound keeps sums finite when a decay of exactly 0 (log -inf) is given."""
HIGHEST = tl.constexpr(0.01 * 1.4426950408889634)
"""LARGEST_LOG_DECAY of matmix.kernels.checks: values on the device cannot be refused without waiting for it."""
BEYOND = tl.constexpr(4.0)
"""More than any exponent inside a triangle can be (HIGHEST times the longest chunk)."""


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
        begin = tl.load(cu_seqlens + document).to(tl.int32)
        length = tl.load(cu_seqlens + document + 1).to(tl.int32) - begin
        piece = slot - (begin // span + document)
        row = low * 0
    else:
        document = slot // per_row
        piece = slot - document * per_row
        row = document
        begin = slot * 0
        length = begin + seqlen
    return document, piece, row, begin, length


@triton.jit
def first_slot(document, begin, per_row, span, PACKED: tl.constexpr):
    """Slot of a document's first piece."""
    if PACKED:
        slot = begin // span + document
    else:
        slot = document * per_row
    return slot


@triton.jit
def log_decays(gate, stride, index, valid, GATED: tl.constexpr):
    """log2 of the decays of the tokens at `index`, float64; 0 where there is no token or no gate."""
    if GATED:
        a = tl.load(gate + index * stride, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        # Comparisons, not minimum and maximum: those would swallow a NaN.
        a = tl.where(a < LOWEST, LOWEST, a)
        a = tl.where(a > HIGHEST, HIGHEST, a)
    else:
        a = tl.zeros_like(index).to(tl.float32)
    return a.to(tl.float64)


@triton.jit
def two_floats(x):
    """float64 as the sum of two float32."""
    high = x.to(tl.float32)
    return high, (x - high.to(tl.float64)).to(tl.float32)


@triton.jit
def load_rows(x, stride, index, valid, width, BLOCK: tl.constexpr):
    """Rows `index` of a matrix, (rows, BLOCK): zero beyond `width` and where not `valid`."""
    column = tl.arange(0, BLOCK)
    return tl.load(
        x + index[:, None] * stride + column[None, :], mask=valid[:, None] & (column[None, :] < width), other=0.0
    )
