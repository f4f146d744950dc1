"""Triton kernels of the fused MRU mixer: one chunk of one document, for the heads of one tile."""

import triton
import triton.language as tl

from matmix.kernels.matrix_product.passes import last_chunk, multiply, turned
from matmix.kernels.mru import build
from matmix.kernels.slots import locate


@triton.jit
def entering_state(entering, initial, document, slot, chunk, start, length, size, matrix, inside, C: tl.constexpr):
    """The state before a chunk: its left neighbour's last, or the document's first. Blocks without a head are
    identities."""
    state = build.identity(C.TILE)
    if C.INITIAL:
        if chunk == 0:
            state = tl.load(initial + document.to(tl.int64) * size + matrix, mask=inside, other=0.0)
    if C.ENTERING:
        if (chunk > 0) & (start < length):
            state = tl.load(entering + (slot - 1).to(tl.int64) * size + matrix, mask=inside, other=0.0)
    return state


@triton.jit
def block_log_norms(state, same):
    """Log of the Frobenius norm of each block, at every row of it; squares are taken of elements relative to the
    largest."""
    tallest = tl.max(tl.abs(state), axis=0)
    largest = tl.maximum(tl.max(tl.where(same, tallest[None, :], 0.0), axis=1), 1.1754943508222875e-38)
    relative = state / largest[:, None]
    squares = build.block_sums(tl.sum(relative * relative, axis=0), same)
    # Infinity over infinity is NaN: what overflowed stays infinite. A sum below 1 is rounding, or a state of zeros.
    squares = tl.where(largest == float("inf"), 1.0, tl.where(squares < 1.0, 1.0, squares))
    return tl.log(largest) + 0.5 * tl.log(squares)


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row"])
def products_pass(
    elements, e_b, e_l, w_up, d_c, products, cu_seqlens, documents, seqlen, per_row, heads, C: tl.constexpr
):
    """The product of a chunk's state matrices, by slot."""
    slot = tl.program_id(0)
    h0 = tl.program_id(1) * (C.TILE // C.ORDER)
    _, chunk, row_, begin, length = locate(slot, cu_seqlens, documents, seqlen, per_row, C.CHUNK, C.PACKED)
    TURNED: tl.constexpr = C.CONSTRUCTION == "given"
    head, row, column, same, inside = build.block_places(heads, h0, C, TURNED)
    start = chunk * C.CHUNK
    at = elements + row_.to(tl.int64) * e_b + (begin + start).to(tl.int64) * e_l
    places, read, _ = build.token_places(head, row, column, inside, heads, h0, d_c, C)
    at += places
    up = build.load_weights(w_up, heads, h0, d_c, C) if C.CHUNKED else 0
    product = build.identity(C.TILE)
    for _ in range(tl.minimum(C.CHUNK, length - start)):
        given = tl.load(at, mask=read, other=0.0).to(tl.float32)
        m = build.elements_of(given, up, row, column, same, C)
        x = build.build(m, row, column, same, C)
        product = multiply(turned(product, C.TILE) if TURNED else product, x, C.PRECISION)
        at += e_l
    size = heads * C.ORDER * C.ORDER
    head, row, column, _, inside = build.block_places(heads, h0, C)
    matrix = (head * C.ORDER + row) * C.ORDER + column
    tl.store(products + slot.to(tl.int64) * size + matrix, product, mask=inside)


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row"])
def outputs_pass(
    elements, e_b, e_l, w_up, w_down, d_c, y, final, norms, initial, entering, cu_seqlens, documents, seqlen, per_row,
    heads, C: tl.constexpr,
):  # fmt: skip
    """A chunk's states, each projected by `w_down` as soon as it is there; log-norms of the last one by slot and head,
    -inf where a slot has no tokens."""
    slot = tl.program_id(0)
    h0 = tl.program_id(1) * (C.TILE // C.ORDER)
    document, chunk, row_, begin, length = locate(slot, cu_seqlens, documents, seqlen, per_row, C.CHUNK, C.PACKED)
    TURNED: tl.constexpr = C.CONSTRUCTION == "given"
    head, row, column, same, inside = build.block_places(heads, h0, C)
    size = heads * C.ORDER * C.ORDER
    matrix = (head * C.ORDER + row) * C.ORDER + column
    start = chunk * C.CHUNK
    at = elements + row_.to(tl.int64) * e_b + (begin + start).to(tl.int64) * e_l
    x_head, x_row, x_column, x_same, x_inside = build.block_places(heads, h0, C, TURNED)
    places, read, _ = build.token_places(x_head, x_row, x_column, x_inside, heads, h0, d_c, C)
    at += places
    up = build.load_weights(w_up, heads, h0, d_c, C) if C.CHUNKED else 0
    w = build.load_weights(w_down, heads, h0, d_c, C, True)
    flat, there = build.row_places(heads, h0, d_c, C)
    width = heads * C.ORDER * d_c
    at_y = y + (row_.to(tl.int64) * seqlen + begin + start) * width
    at_y += flat
    state = entering_state(entering, initial, document, slot, chunk, start, length, size, matrix, inside, C)
    for _ in range(tl.minimum(C.CHUNK, length - start)):
        given = tl.load(at, mask=read, other=0.0).to(tl.float32)
        m = build.elements_of(given, up, x_row, x_column, x_same, C)
        x = build.build(m, x_row, x_column, x_same, C)
        state = multiply(turned(state, C.TILE) if TURNED else state, x, C.PRECISION)
        tl.store(
            at_y, tl.dot(turned(state, C.TILE), w, input_precision=C.PROJECTION).to(y.dtype.element_ty), mask=there
        )
        at += e_l
        at_y += width
    if last_chunk(chunk, start, length, C.CHUNK):
        tl.store(final + document.to(tl.int64) * size + matrix, state, mask=inside)
    log_norm = tl.where(start < length, block_log_norms(state, same), float("-inf"))
    i = tl.arange(0, C.TILE)
    of_head = h0 + i // C.ORDER
    tl.store(norms + slot.to(tl.int64) * heads + of_head, log_norm, mask=(i % C.ORDER == 0) & (of_head < heads))


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row"])
def collect_pass(
    elements, e_b, e_l, w_up, w_down, d_c, dy, dy_b, dy_l, dfinal, inner, sums, cu_seqlens, documents, seqlen, per_row,
    heads, C: tl.constexpr,
):  # fmt: skip
    """A chunk's own products before every GROUP-th token, into `inner` by slot and group, and with SUMS what its tokens
    add to the cotangent of the state before it: sum of dH_t (X_1 ... X_t)^T, into `sums` by slot."""
    slot = tl.program_id(0)
    h0 = tl.program_id(1) * (C.TILE // C.ORDER)
    document, chunk, row_, begin, length = locate(slot, cu_seqlens, documents, seqlen, per_row, C.CHUNK, C.PACKED)
    TURNED: tl.constexpr = C.CONSTRUCTION == "given"
    head, row, column, same, inside = build.block_places(heads, h0, C)
    size = heads * C.ORDER * C.ORDER
    matrix = (head * C.ORDER + row) * C.ORDER + column
    start = chunk * C.CHUNK
    token = (begin + start).to(tl.int64)
    # One pointer advances and small offsets stay: tiles of pointers would take twice the registers.
    x_head, x_row, x_column, x_same, x_inside = build.block_places(heads, h0, C, TURNED)
    places, read, _ = build.token_places(x_head, x_row, x_column, x_inside, heads, h0, d_c, C)
    up = build.load_weights(w_up, heads, h0, d_c, C) if C.CHUNKED else 0
    at = elements + row_.to(tl.int64) * e_b + token * e_l
    at_inner = inner + slot.to(tl.int64) * ((C.CHUNK + C.GROUP - 1) // C.GROUP) * size
    product = build.identity(C.TILE)
    total = tl.zeros((C.TILE, C.TILE), tl.float32)
    if C.SUMS:
        w = build.load_weights(w_down, heads, h0, d_c, C)
        flat, there = build.row_places(heads, h0, d_c, C)
        at_dy = dy + row_.to(tl.int64) * dy_b + token * dy_l if C.GIVEN else dy
    for step in range(tl.minimum(C.CHUNK, length - start)):
        if step % C.GROUP == 0:
            tl.store(at_inner + matrix, product, mask=inside)
            at_inner += size
        given = tl.load(at + places, mask=read, other=0.0).to(tl.float32)
        m = build.elements_of(given, up, x_row, x_column, x_same, C)
        x = build.build(m, x_row, x_column, x_same, C)
        product = multiply(turned(product, C.TILE) if TURNED else product, x, C.PRECISION)
        at += e_l
        if C.SUMS and C.GIVEN:
            g = tl.load(at_dy + flat, mask=there, other=0.0).to(tl.float32)
            dh = tl.where(same, tl.dot(g, tl.trans(w), input_precision=C.PROJECTION), 0.0)
            total += multiply(dh, tl.trans(product), C.PRECISION)
            at_dy += dy_l
    if C.SUMS:
        if C.DFINAL:
            if last_chunk(chunk, start, length, C.CHUNK):
                b = tl.load(dfinal + document.to(tl.int64) * size + matrix, mask=inside, other=0.0)
                total += multiply(b, tl.trans(product), C.PRECISION)
        tl.store(sums + slot.to(tl.int64) * size + matrix, total, mask=inside)


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row"])
def gradients_pass(
    elements, e_b, e_l, w_up, w_down, d_c, dy, dy_b, dy_l, dfinal, built, arriving, inner, work, initial, entering, out,
    dw_up, dw_down, dinitial, cu_seqlens, documents, seqlen, per_row, heads, C: tl.constexpr,
):  # fmt: skip
    """A chunk from the right: gradients of its elements (or its tokens' chunks), its share of the weights' by slot, and
    at a document's first chunk that of the initial state.

    States are computed again, GROUP tokens at a time, from the products that `collect_pass` left. Those of a group
    wait in `work` (slots, 2 GROUP, nheads, o, o), of which a program reads what it wrote while it is in the cache. So
    do the group's state matrices, unless all are there as `built` (batch, seqlen, nheads, o, o): `work` then has GROUP.
    Registers are short: hence weights that are loaded for every group, and a loop of its own for the gradients of
    chunks.
    """
    slot = tl.program_id(0)
    h0 = tl.program_id(1) * (C.TILE // C.ORDER)
    document, chunk, row_, begin, length = locate(slot, cu_seqlens, documents, seqlen, per_row, C.CHUNK, C.PACKED)
    head, row, column, same, inside = build.block_places(heads, h0, C)
    size = heads * C.ORDER * C.ORDER
    matrix = (head * C.ORDER + row) * C.ORDER + column
    start = chunk * C.CHUNK
    steps = tl.minimum(C.CHUNK, length - start)
    groups = (steps + C.GROUP - 1) // C.GROUP
    token = (begin + start).to(tl.int64)
    # One pointer advances and small offsets stay: tiles of pointers would take twice the registers.
    places, read, written = build.token_places(head, row, column, inside, heads, h0, d_c, C)
    if C.CHUNKED:
        e_size = heads * C.ORDER * d_c
    else:
        e_size = heads * C.ORDER * C.ORDER
        if C.CONSTRUCTION == "cayley":
            e_size = heads * (C.ORDER * (C.ORDER - 1) // 2)
        elif C.CONSTRUCTION == "affine":
            e_size = heads * (C.ORDER * (C.ORDER // 2))
    up = build.load_weights(w_up, heads, h0, d_c, C) if C.CHUNKED else 0
    dup = tl.zeros((C.TILE, C.WIDTH), tl.float32) if C.CHUNKED else 0
    at = elements + row_.to(tl.int64) * e_b + token * e_l
    at_out = out + (row_.to(tl.int64) * seqlen + token) * e_size
    w = build.load_weights(w_down, heads, h0, d_c, C)
    flat, there = build.row_places(heads, h0, d_c, C)
    at_dy = dy + row_.to(tl.int64) * dy_b + token * dy_l if C.GIVEN else dy
    at_inner = inner + slot.to(tl.int64) * ((C.CHUNK + C.GROUP - 1) // C.GROUP) * size
    WAITING: tl.constexpr = C.GROUP if C.BUILT else 2 * C.GROUP
    at_work = work + slot.to(tl.int64) * WAITING * size
    at_built = built + (row_.to(tl.int64) * seqlen + token) * size if C.BUILT else work
    b = tl.zeros((C.TILE, C.TILE), tl.float32)
    dw = tl.zeros((C.TILE, C.WIDTH), tl.float32)
    if C.DFINAL:
        if last_chunk(chunk, start, length, C.CHUNK):
            b += tl.load(dfinal + document.to(tl.int64) * size + matrix, mask=inside, other=0.0)
    if C.ARRIVING:
        if start + C.CHUNK < length:
            b += tl.load(arriving + slot.to(tl.int64) * size + matrix, mask=inside, other=0.0)
    for back in range(groups):
        group = groups - 1 - back
        first = group * C.GROUP
        count = tl.minimum(C.GROUP, steps - first)
        # Loaded again for every group: registers are short.
        state = entering_state(entering, initial, document, slot, chunk, start, length, size, matrix, inside, C)
        own = tl.load(at_inner + group * size + matrix, mask=inside, other=0.0)
        state = multiply(state, own, C.PRECISION)
        for step in range(count):
            tl.store(at_work + step * size + matrix, state, mask=inside)
            if C.BUILT:
                x = tl.load(at_built + (first + step) * size + matrix, mask=inside, other=0.0)
            else:
                given = tl.load(at + (first + step).to(tl.int64) * e_l + places, mask=read, other=0.0).to(tl.float32)
                m = build.elements_of(given, up, row, column, same, C)
                x = build.build(m, row, column, same, C)
                tl.store(at_work + (C.GROUP + step) * size + matrix, x, mask=inside)
            state = multiply(state, x, C.PRECISION)
        tl.debug_barrier()
        for reverse in range(count):
            step = count - 1 - reverse
            place = (first + step).to(tl.int64)
            if C.GIVEN:
                g = tl.load(at_dy + place * dy_l + flat, mask=there, other=0.0).to(tl.float32)
                b += tl.where(same, tl.dot(g, tl.trans(w), input_precision=C.PROJECTION), 0.0)
                dw = tl.dot(tl.trans(state), g, acc=dw, input_precision=C.PROJECTION)
            # Keeps the compiler from mixing the products of the three parts, whose operands would not fit registers.
            tl.debug_barrier()
            state = tl.load(at_work + step * size + matrix, mask=inside, other=0.0)
            if C.BUILT:
                x = tl.load(at_built + (first + step) * size + matrix, mask=inside, other=0.0)
            else:
                x = tl.load(at_work + (C.GROUP + step) * size + matrix, mask=inside, other=0.0)
            dx = multiply(tl.trans(state), b, C.PRECISION)
            b = multiply(b, tl.trans(x), C.PRECISION)
            tl.debug_barrier()
            m = x
            if not C.BUILT:
                given = tl.load(at + place * e_l + places, mask=read, other=0.0).to(tl.float32)
                m = build.elements_of(given, up, row, column, same, C)
            gradient = build.build_gradient(dx, x, m, row, column, same, C)
            if C.CHUNKED:
                # That of M; a triangle's is antisymmetric already. Outside the blocks only L D U's diagonal is not 0.
                if C.CONSTRUCTION == "ldu":
                    gradient = tl.where(same, gradient, 0.0)
                tl.debug_barrier()
                given = tl.load(at + place * e_l + places, mask=read, other=0.0).to(tl.float32)
                dup = tl.dot(tl.trans(gradient), given, acc=dup, input_precision=C.PROJECTION)
                gradient = tl.dot(gradient, up, input_precision=C.PROJECTION)
            tl.store(at_out + place * e_size + places, gradient.to(out.dtype.element_ty), mask=written)
        tl.debug_barrier()
    if C.INITIAL:
        if chunk == 0:
            tl.store(dinitial + document.to(tl.int64) * size + matrix, b, mask=inside)
    if C.GIVEN:
        tl.store(dw_down + slot.to(tl.int64) * heads * C.ORDER * d_c + flat, dw, mask=there)
    if C.CHUNKED:
        tl.store(dw_up + slot.to(tl.int64) * heads * C.ORDER * d_c + places, dup, mask=written)
