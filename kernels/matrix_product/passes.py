"""Triton kernels of the matrix-product scan, and products of small tiles, as exact as float32 and with few instructions
around them."""

import triton
import triton.language as tl

from matmix.kernels.slots import locate


@triton.jit
def split(x):
    """Two numbers whose sum is x, of which the first has as many bits as tensor cores read of float32."""
    rounded = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    large = rounded.to(tl.float32, bitcast=True)
    return large, x - large


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """a b as exact as float32. The compiler's own tf32x3 takes half as many instructions more, as with it infinities
    stay what they are, which here may become NaN."""
    if PRECISION == "tf32x3":
        a_large, a_small = split(a)
        b_large, b_small = split(b)
        c = tl.dot(a_small, b_large, input_precision="tf32")
        c = tl.dot(a_large, b_small, acc=c, input_precision="tf32")
        c = tl.dot(a_large, b_large, acc=c, input_precision="tf32")
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    return c


@triton.jit
def turned_places(TILE: tl.constexpr):
    """The columns of a tile in the order in which `turned` puts them."""
    i = tl.arange(0, TILE)
    return i // 8 * 8 + i % 4 * 2 + i // 4 % 2


@triton.jit
def turned(x, TILE: tl.constexpr):
    """The columns of a tile in another order: a lane of a tensor core then has the numbers that it needs to multiply a
    product again, by a tile whose rows are in this order, and they need not be exchanged."""
    return tl.reshape(tl.permute(tl.reshape(x, (TILE, TILE // 8, 4, 2)), (0, 1, 3, 2)), (TILE, TILE))


@triton.jit
def block_offsets(heads, h0, stride_h, C: tl.constexpr, TURNED: tl.constexpr = False):
    """Offsets of a tile whose diagonal blocks are the matrices of heads h0, h0 + 1, ..., and where there is one. The
    rows can be `turned`."""
    i = tl.arange(0, C.TILE)
    r = turned_places(C.TILE) if TURNED else i
    head = h0 + r // C.ORDER
    offsets = (head * stride_h + r % C.ORDER * C.ORDER)[:, None] + (i % C.ORDER)[None, :]
    inside = (r // C.ORDER)[:, None] == (i // C.ORDER)[None, :]
    return offsets, inside & (head < heads)[:, None]


@triton.jit
def last_chunk(chunk, start, length, CHUNK: tl.constexpr):
    """Returns whether a document ends here; a document without tokens ends in its first, empty chunk."""
    return ((start < length) & (start + CHUNK >= length)) | ((length == 0) & (chunk == 0))


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row"])
def prefix_pass(
    x, x_b, x_l, h, products, final, initial, entering, cu_seqlens, documents, seqlen, per_row, heads, C: tl.constexpr
):
    """One chunk: with STORE its states, into `h`, and with FINAL a document's last one; else its product alone, into
    `products` by slot.

    `entering` holds the states behind every chunk (slots, nheads, o, o): a chunk starts from its left neighbour's.
    """
    slot = tl.program_id(0)
    h0 = tl.program_id(1) * (C.TILE // C.ORDER)
    document, chunk, row, begin, length = locate(slot, cu_seqlens, documents, seqlen, per_row, C.CHUNK, C.PACKED)
    size: tl.constexpr = C.ORDER * C.ORDER
    offsets, inside = block_offsets(heads, h0, size, C)
    x_offsets, x_inside = block_offsets(heads, h0, size, C, True)
    i = tl.arange(0, C.TILE)
    # Blocks of heads that do not exist stay identities.
    state = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    start = chunk * C.CHUNK
    if C.INITIAL:
        if chunk == 0:
            state = tl.load(initial + document.to(tl.int64) * heads * size + offsets, mask=inside, other=0.0)
    if C.ENTERING:
        if (chunk > 0) & (start < length):
            state = tl.load(entering + (slot - 1).to(tl.int64) * heads * size + offsets, mask=inside, other=0.0)
    at_x = x + row.to(tl.int64) * x_b + (begin + start).to(tl.int64) * x_l + x_offsets
    at_h = h + (row.to(tl.int64) * seqlen + begin + start) * heads * size + offsets if C.STORE else h
    # A slot of no document has no steps and leaves the identity.
    for _ in range(tl.minimum(C.CHUNK, length - start)):
        factor = tl.load(at_x, mask=x_inside, other=0.0).to(tl.float32)
        state = multiply(turned(state, C.TILE), factor, C.PRECISION)
        at_x += x_l
        if C.STORE:
            tl.store(at_h, state.to(h.dtype.element_ty), mask=inside)
            at_h += heads * size
    if C.FINAL:
        if last_chunk(chunk, start, length, C.CHUNK):
            tl.store(final + document.to(tl.int64) * heads * size + offsets, state, mask=inside)
    if not C.STORE:
        tl.store(products + slot.to(tl.int64) * heads * size + offsets, state, mask=inside)


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row"])
def suffix_pass(
    dh, dh_b, dh_l, x, x_b, x_l, h, initial, dfinal, arriving, out, dinitial, cu_seqlens, documents, seqlen, per_row,
    heads, C: tl.constexpr,
):  # fmt: skip
    """One chunk from the right, carrying the cotangent b of the state before what comes next.

    TOKENS: steps are tokens, b <- (b + dh_t) x_t^T, and with WRITE dx_t = h_{t-1}^T (b + dh_t) goes to `out`.
    Else steps are chunks of the level below: with WRITE the b that arrives at each goes to `out`, and
    b <- b x_c^T + dh_c. Without WRITE `out` gets b as it leaves the chunk, by slot. `arriving`: the same at the
    chunk's right edge, by slot; DFINAL: at a document's.
    """
    slot = tl.program_id(0)
    h0 = tl.program_id(1) * (C.TILE // C.ORDER)
    document, chunk, row, begin, length = locate(slot, cu_seqlens, documents, seqlen, per_row, C.CHUNK, C.PACKED)
    size: tl.constexpr = C.ORDER * C.ORDER
    offsets, inside = block_offsets(heads, h0, size, C)
    i = tl.arange(0, C.TILE)
    b = tl.zeros((C.TILE, C.TILE), tl.float32)
    start = chunk * C.CHUNK
    steps = tl.minimum(C.CHUNK, length - start)
    if C.DFINAL:
        if last_chunk(chunk, start, length, C.CHUNK):
            b += tl.load(dfinal + document.to(tl.int64) * heads * size + offsets, mask=inside, other=0.0)
    if C.ARRIVING:
        if start + C.CHUNK < length:
            b += tl.load(arriving + slot.to(tl.int64) * heads * size + offsets, mask=inside, other=0.0)
    token = (begin + start + steps - 1).to(tl.int64)
    row = row.to(tl.int64)
    at_x = x + row * x_b + token * x_l + offsets
    at_dh = dh + row * dh_b + token * dh_l + offsets if C.GIVEN else dh
    at_out = out + (row * seqlen + token) * heads * size + offsets if C.WRITE else out
    at_h = h + (row * seqlen + token - 1) * heads * size + offsets if (C.TOKENS and C.WRITE) else h
    for step in range(steps):
        factor = tl.load(at_x, mask=inside, other=0.0).to(tl.float32)
        at_x -= x_l
        if C.TOKENS:
            if C.GIVEN:
                b += tl.load(at_dh, mask=inside, other=0.0).to(tl.float32)
                at_dh -= dh_l
            if C.WRITE:
                # The document's first token multiplies the state that was given, or the identity.
                place = start + steps - 1 - step
                before = tl.load(at_h, mask=inside & (place > 0), other=0.0).to(tl.float32)
                at_h -= heads * size
                if place == 0:
                    if C.INITIAL:
                        before = tl.load(
                            initial + document.to(tl.int64) * heads * size + offsets, mask=inside, other=0.0
                        )
                    else:
                        before = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
                dx = multiply(tl.trans(before), b, C.PRECISION)
                tl.store(at_out, dx.to(out.dtype.element_ty), mask=inside)
                at_out -= heads * size
            b = multiply(b, tl.trans(factor), C.PRECISION)
        else:
            if C.WRITE:
                tl.store(at_out, b, mask=inside)
                at_out -= heads * size
            added = tl.load(at_dh, mask=inside, other=0.0)
            at_dh -= dh_l
            b = multiply(b, tl.trans(factor), C.PRECISION) + added
    if C.DINITIAL:
        if chunk == 0:
            tl.store(dinitial + document.to(tl.int64) * heads * size + offsets, b, mask=inside)
    if not C.WRITE:
        tl.store(out + slot.to(tl.int64) * heads * size + offsets, b, mask=inside)
