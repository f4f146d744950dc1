"""States between chunks: one pass over each document, from either end, in parallel over heads and directions.

The same kernel computes the states that enter each chunk and, in the backward pass, the cotangents of the states
that leave it: both are h <- exp(sum of decays) h + sum over the chunk's tokens of weight_t key_t value_t^T, only
the order of chunks, the keys (k or shifted q), the values (v or dy) and the weights differ.

Few long documents would leave most of a GPU idle. They are cut into spans: a first launch runs every span from
zero, `combine_kernel` passes the results along the spans, and a second launch runs each span from its true start.
"""

from __future__ import annotations

import triton
import triton.language as tl

from matmix.kernels.semiseparable.fused.layout import load_factor, load_rows, log_decays, shifted
from matmix.kernels.slots import bounds, first_slot, locate


@triton.jit
def carry_states(
    k, k_l, v, v_l, a, a_l, w, w_l, u, u_l,
    states, state_step, vectors, vector_step,
    h, z, first, last, length, d_state, headdim, n0, p0,
    REVERSE: tl.constexpr, COTANGENT: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    STORE: tl.constexpr, VECTOR: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run a tile (BLOCK_N, BLOCK_P) of a state through chunks first .. last - 1 of a document, in either order.

    Pointers stand at the document's first token and the program's head; `states` and `vectors` at the document's
    first slot. Returns the state, the vector and
    the sum of log2 decays.
    """
    i = tl.arange(0, CHUNK)
    n = n0 + tl.arange(0, BLOCK_N)
    p = p0 + tl.arange(0, BLOCK_P)
    in_state = (n[:, None] < d_state) & (p[None, :] < headdim)
    passed = tl.sum(tl.zeros((CHUNK,), tl.float64), 0)
    for step in range(first, last):
        # (Added to a tensor because the interpreter counts in Python's integers.)
        chunk = (first + last - 1 - step if REVERSE else first * 0 + step).to(tl.int64)
        start = chunk * CHUNK
        valid = start + i < length
        if STORE:
            tl.store(
                states + chunk * state_step + n[:, None] * headdim + p[None, :],
                h.to(states.dtype.element_ty), mask=in_state,
            )  # fmt: skip
            if VECTOR:
                tl.store(vectors + chunk * vector_step + n, z, mask=n < d_state)
        decay = log_decays(a, a_l, start + i, valid, GATED)
        total = tl.sum(decay, 0)
        # From the token to the edge that the state leaves by.
        outward = tl.cumsum(decay, 0) if REVERSE else total - tl.cumsum(decay, 0)
        if REVERSE and not (COTANGENT and not SHIFT):
            outward -= decay
        if not REVERSE and COTANGENT and not SHIFT:
            outward += decay
        weight = tl.exp2(outward.to(tl.float32))
        if SCALED:
            weight *= load_factor(w, w_l, start + i, valid)
        # The cotangent of a direction's states runs the other way.
        source, present = shifted(i, start, length, not REVERSE, SHIFT and COTANGENT)
        keys = load_rows(k + start * k_l, k_l, source, present, n0, d_state, BLOCK_N)
        values = load_rows(v + start * v_l, v_l, i, valid, p0, headdim, BLOCK_P)
        values = (values.to(tl.float32) * weight[:, None]).to(keys.dtype)
        factor = tl.exp2(total.to(tl.float32))
        h = tl.dot(tl.trans(keys), values, acc=h * factor, input_precision=PRECISION)
        if VECTOR:
            if COTANGENT:
                weight *= load_factor(u, u_l, start + i, valid)
            z = z * factor + tl.sum(keys.to(tl.float32) * weight[:, None], 0)
        passed += total
    return h, z, passed


@triton.jit(do_not_specialize=["documents", "seqlen", "per_row", "spans_per_row", "span_chunks", "direction"])
def state_pass(
    k, k_b, k_l, k_g, v, v_b, v_l, v_h, a, a_b, a_l, a_h, w, w_b, w_l, w_h, u, u_b, u_l, u_h,
    states, vectors, entry, entry_vectors, ends, end_vectors, end_decays,
    cu_seqlens, documents, seqlen, per_row, spans_per_row, span_chunks, heads, share, d_state, headdim, direction,
    directions: tl.constexpr, REVERSE: tl.constexpr, COTANGENT: tl.constexpr, SHIFT: tl.constexpr,
    GATED: tl.constexpr, SCALED: tl.constexpr, STORE: tl.constexpr, VECTOR: tl.constexpr, ENTRY: tl.constexpr,
    END: tl.constexpr, DECAYS: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One span of one document, one head, one direction, one tile of the state."""
    unit = tl.program_id(0)
    head = tl.program_id(1)
    tiles = tl.cdiv(headdim, BLOCK_P)
    n0 = tl.program_id(2) // tiles * BLOCK_N
    p0 = tl.program_id(2) % tiles * BLOCK_P
    document, piece, row, begin, length = locate(
        unit, cu_seqlens, documents, seqlen, spans_per_row, span_chunks * CHUNK, PACKED
    )
    chunks = tl.cdiv(length, CHUNK)
    first = piece * span_chunks
    last = tl.minimum(first + span_chunks, chunks)
    n = n0 + tl.arange(0, BLOCK_N)
    p = p0 + tl.arange(0, BLOCK_P)
    in_state = (n[:, None] < d_state) & (p[None, :] < headdim)
    which = (unit.to(tl.int64) * heads + head) * directions + direction
    of_unit = which * d_state * headdim + n[:, None] * headdim + p[None, :]
    h = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    z = tl.zeros((BLOCK_N,), tl.float32)
    if ENTRY:
        h += tl.load(entry + of_unit, mask=in_state, other=0.0).to(tl.float32)
        if VECTOR:
            z += tl.load(entry_vectors + which * d_state + n, mask=n < d_state, other=0.0)
    slot = first_slot(document, begin, per_row, CHUNK, PACKED)
    of_slot = (slot.to(tl.int64) * heads + head) * directions + direction
    row = row.to(tl.int64)
    begin = begin.to(tl.int64)
    group = head // share
    h, z, passed = carry_states(
        k + row * k_b + begin * k_l + group * k_g, k_l,
        v + row * v_b + begin * v_l + head * v_h, v_l,
        a + row * a_b + begin * a_l + head * a_h if GATED else a, a_l,
        w + row * w_b + begin * w_l + head * w_h if SCALED else w, w_l,
        u + row * u_b + begin * u_l + head * u_h if (VECTOR and COTANGENT) else u, u_l,
        states + of_slot * d_state * headdim if STORE else states, heads * directions * d_state * headdim,
        vectors + of_slot * d_state if (STORE and VECTOR) else vectors, heads * directions * d_state,
        h, z, first, last, length, d_state, headdim, n0, p0,
        REVERSE, COTANGENT, SHIFT, GATED, SCALED, STORE, VECTOR, CHUNK, BLOCK_N, BLOCK_P, PRECISION,
    )  # fmt: skip
    if END:
        tl.store(ends + of_unit, h, mask=in_state)
        if VECTOR:
            tl.store(end_vectors + which * d_state + n, z, mask=n < d_state)
    if DECAYS:
        tl.store(end_decays + which, tl.exp2(passed.to(tl.float32)))


@triton.jit(do_not_specialize=["per_row", "span", "seqlen", "direction", "elements"])
def combine_spans(
    ends, end_decays, initial, final, cu_seqlens, seqlen, per_row, span, heads, elements, direction,
    directions: tl.constexpr, REVERSE: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace what each span of a document adds to the state, in `ends`, by the state that enters the span."""
    document = tl.program_id(0)
    head = tl.program_id(1)
    e = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = e < elements
    begin, length = bounds(document, cu_seqlens, seqlen, PACKED)
    first = first_slot(document, begin, per_row, span, PACKED)
    spans = tl.cdiv(length, span)
    of_document = ((document.to(tl.int64) * heads + head) * directions + direction) * elements + e
    h = tl.zeros((BLOCK,), tl.float32)
    if INITIAL:
        h += tl.load(initial + of_document, mask=inside, other=0.0).to(tl.float32)
    for step in range(spans):
        unit = (first + spans - 1 - step if REVERSE else first + step).to(tl.int64)
        which = (unit * heads + head) * directions + direction
        added = tl.load(ends + which * elements + e, mask=inside, other=0.0)
        tl.store(ends + which * elements + e, h, mask=inside)
        h = h * tl.load(end_decays + which) + added
    if FINAL:
        tl.store(final + of_document, h, mask=inside)
