"""The matrix memory in Triton, forward and backward.

A program, of one warp, goes along the tokens of one row or document with the states of a few heads in registers, laid
out (key, channel), and makes the transitions of every token for each channel anew. Forward the states that enter chunks
of a few tokens are stored; backward a program goes back over the chunks, computes the states within one again and
carries the cotangent of the state. Sums over heads and rows are left by program; PyTorch adds them in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.launching import blocks_in_place, launch, rows_in_place
from matmix.kernels.matrix_memory.chunked import MemoryInputs, MemoryOutputs
from matmix.kernels.slots import bounds, count_documents, count_slots, first_slot

CHUNK = 8
"""Tokens between stored states, and whose states the backward pass has in registers at a time."""
LANES = 32
"""Channels of a program where heads are no wider: one for each thread of a warp."""


@triton.jit
def _load(x, at, there):
    return tl.load(x + at, there, other=0.0).to(tl.float32)


@triton.jit
def _transition(elements, at, there, N: tl.constexpr):
    """A (N, N, heads or lanes) from M, by places `at` of its first elements; and what the rows of I + M were multiplied
    by, (N, heads or lanes), at most 1. The identity where nothing is there."""
    i = tl.arange(0, N)[:, None, None]
    j = tl.arange(0, N)[None, :, None]
    rows = _load(elements, at[None, None, :] + i * N + j, there[None, None, :]) + tl.where(i == j, 1.0, 0.0)
    # One division for a row: they take ten times as long as products.
    factors = 1.0 / tl.maximum(tl.sum(tl.abs(rows), 1), 1.0)
    return rows * factors[:, None, :], factors


@triton.jit
def _advanced(state, turn, value, key, rate):
    """S A + v (rates k)^T; the state (N, lanes), A (N, N, lanes), value (lanes), key (N, 1), rates (N, lanes)."""
    return tl.sum(state[:, None, :] * turn, 0) + rate * key * value[None, :]


@triton.jit
def _places(program, heads, width, C: tl.constexpr):
    """The head and the channel in it of each lane of a program, and whether there is such."""
    lane = tl.arange(0, C.HEADS * C.WIDTH)
    head = program * C.HEADS + lane // C.WIDTH
    channel = lane % C.WIDTH
    return head, channel, (head < heads) & (channel < width)


@triton.jit(do_not_specialize=["seqlen", "per_row"])
def memory_forward_pass(
    v, m, k, q, rates, initial, y, final, edges, cu_seqlens, seqlen, per_row, heads, width, v_batch, v_row, m_batch,
    m_row, k_batch, k_row, q_batch, q_row, C: tl.constexpr,
):  # fmt: skip
    """Outputs, last states and the states that enter chunks."""
    programs = tl.cdiv(heads, C.HEADS)
    document = tl.program_id(0) // programs
    head, channel, here = _places(tl.program_id(0) - document * programs, heads, width, C)
    n = tl.arange(0, C.N)[:, None]
    begin, length = bounds(document, cu_seqlens, seqlen, C.PACKED)
    row = (document * (0 if C.PACKED else 1)).to(tl.int64)
    token = begin.to(tl.int64)
    v += row * v_batch + token * v_row
    m += row * m_batch + token * m_row
    k += row * k_batch + token * k_row
    q += row * q_batch + token * q_row
    flat = head * width + channel
    y += (row * seqlen + token) * heads * width
    rate = _load(rates, head[None, :] * C.N + n, here[None, :])
    state = tl.zeros((C.N, C.HEADS * C.WIDTH), tl.float32)
    of_document = document.to(tl.int64) * heads * width * C.N + flat[None, :] * C.N + n
    if C.INITIAL:
        state += _load(initial, of_document, here[None, :])
    slot = first_slot(document, begin, per_row, C.CHUNK, C.PACKED)
    for chunk in range(tl.cdiv(length, C.CHUNK)):
        at = edges + (slot + chunk).to(tl.int64) * (heads * width * C.N)
        tl.store(at + n * (heads * width) + flat[None, :], state, here[None, :])
        outputs = ()
        first = token * 0 + chunk * C.CHUNK
        for ahead in tl.static_range(C.CHUNK):
            t = first + ahead
            inside = t < length
            turn, _ = _transition(m + t * m_row, head * (C.N * C.N), here & inside, C.N)
            value = _load(v, t * v_row + flat, here & inside)
            state = _advanced(state, turn, value, _load(k, t * k_row + n, inside), rate)
            outputs += (tl.sum(state * _load(q, t * q_row + n, inside), 0),)
        # Stored together: a load is not moved to before a store.
        for ahead in tl.static_range(C.CHUNK):
            t = first + ahead
            tl.store(y + t * heads * width + flat, outputs[ahead].to(y.dtype.element_ty), here & (t < length))
    tl.store(final + of_document, state, here[None, :])


@triton.jit(do_not_specialize=["seqlen", "per_row", "tokens"])
def memory_backward_pass(
    dy, dfinal, v, m, k, q, rates, edges, dv, dm, dk, dq, drates, dinitial, cu_seqlens, seqlen, per_row, tokens, heads,
    width, dy_batch, dy_row, v_batch, v_row, m_batch, m_row, k_batch, k_row, q_batch, q_row, C: tl.constexpr,
):  # fmt: skip
    """dv and dm, by program dk and dq, by document drates, and the gradient of initial states."""
    programs = tl.cdiv(heads, C.HEADS)
    document = tl.program_id(0) // programs
    program = tl.program_id(0) - document * programs
    head, channel, here = _places(program, heads, width, C)
    of_heads = program * C.HEADS + tl.arange(0, C.HEADS)
    n = tl.arange(0, C.N)[:, None]
    begin, length = bounds(document, cu_seqlens, seqlen, C.PACKED)
    row = (document * (0 if C.PACKED else 1)).to(tl.int64)
    token = begin.to(tl.int64)
    dy += row * dy_batch + token * dy_row
    v += row * v_batch + token * v_row
    m += row * m_batch + token * m_row
    k += row * k_batch + token * k_row
    q += row * q_batch + token * q_row
    flat = head * width + channel
    dv += (row * seqlen + token) * heads * width
    dm += (row * seqlen + token) * heads * (C.N * C.N)
    at_shared = (program * tokens + row * seqlen + token) * C.N
    rate = _load(rates, head[None, :] * C.N + n, here[None, :])
    cotangent = tl.zeros((C.N, C.HEADS * C.WIDTH), tl.float32)
    of_document = document.to(tl.int64) * heads * width * C.N + flat[None, :] * C.N + n
    if C.FINAL:
        cotangent += _load(dfinal, of_document, here[None, :])
    of_rates = tl.zeros((C.N, C.HEADS * C.WIDTH), tl.float32)
    slot = first_slot(document, begin, per_row, C.CHUNK, C.PACKED)
    chunks = tl.cdiv(length, C.CHUNK)
    for done in range(chunks):
        first = token * 0 + (chunks - 1 - done) * C.CHUNK
        at = edges + (slot + chunks - 1 - done).to(tl.int64) * (heads * width * C.N)
        state = _load(at, n * (heads * width) + flat[None, :], here[None, :])
        states = (state,)
        for ahead in tl.static_range(C.CHUNK):
            t = first + ahead
            inside = t < length
            turn, _ = _transition(m + t * m_row, head * (C.N * C.N), here & inside, C.N)
            value = _load(v, t * v_row + flat, here & inside)
            state = _advanced(state, turn, value, _load(k, t * k_row + n, inside), rate)
            states += (state,)
        for back in tl.static_range(C.CHUNK):
            t = first + (C.CHUNK - 1 - back)
            inside = t < length
            value = _load(v, t * v_row + flat, here & inside)
            key = _load(k, t * k_row + n, inside)
            given = _load(dy, t * dy_row + flat, here & inside)[None, :]
            places = at_shared + t * C.N + n
            tl.store(dq + places, tl.sum(states[C.CHUNK - back] * given, 1)[:, None], inside)
            cotangent += _load(q, t * q_row + n, inside) * given
            of_written = cotangent * value[None, :]
            tl.store(dk + places, tl.sum(of_written * rate, 1)[:, None], inside)
            of_rates += of_written * key
            of_value = tl.sum(cotangent * rate * key, 0)
            tl.store(dv + t * heads * width + flat, of_value.to(dv.dtype.element_ty), here & inside)
            # A of each head once more, for its own gradient.
            product = states[C.CHUNK - 1 - back][:, None, :] * cotangent[None, :, :]
            of_turn = tl.sum(tl.reshape(product, (C.N, C.N, C.HEADS, C.WIDTH)), 3)
            there = (of_heads < heads) & inside
            turn, factors = _transition(m + t * m_row, of_heads * (C.N * C.N), there, C.N)
            along = tl.where(factors < 1.0, tl.sum(of_turn * turn, 1), 0.0)
            sign = tl.where(turn > 0, 1.0, tl.where(turn < 0, -1.0, 0.0))
            of_elements = (of_turn - sign * along[:, None, :]) * factors[:, None, :]
            i = tl.arange(0, C.N)[:, None, None]
            j = tl.arange(0, C.N)[None, :, None]
            at_elements = t * heads * (C.N * C.N) + of_heads[None, None, :] * (C.N * C.N) + i * C.N + j
            tl.store(dm + at_elements, of_elements.to(dm.dtype.element_ty), there[None, None, :])
            turn, _ = _transition(m + t * m_row, head * (C.N * C.N), here & inside, C.N)
            # G A^T, of which the sum is over the second dimension.
            cotangent = tl.sum(cotangent[None, :, :] * turn, 1)
    tl.store(drates + of_document, of_rates, here[None, :])
    if C.INITIAL:
        tl.store(dinitial + of_document, cotangent, here[None, :])


def _heads_of_program(width: int) -> int:
    return max(1, LANES // triton.next_power_of_2(width))


def _launch(kernel, given: MemoryInputs, tensors: tuple, numbers: tuple, strided: tuple[Tensor, ...], **flags) -> None:
    """One program for each document and few heads."""
    batch, seqlen, heads, width = given.values.shape
    of_program = _heads_of_program(width)
    strides = (stride for each in strided for stride in each.stride()[:2])
    launch(
        kernel, (count_documents(batch, given.cu_seqlens) * triton.cdiv(heads, of_program),),
        *tensors, given.cu_seqlens, seqlen, triton.cdiv(seqlen, CHUNK), *numbers, heads, width, *strides,
        num_warps=1, N=given.keys.shape[2], HEADS=of_program, WIDTH=triton.next_power_of_2(width), CHUNK=CHUNK,
        PACKED=given.cu_seqlens is not None, INITIAL=given.initial_state is not None, **flags,
    )  # fmt: skip


def _laid_out(given: MemoryInputs) -> MemoryInputs:
    initial = None if given.initial_state is None else given.initial_state.contiguous()
    values, elements = (blocks_in_place(x, 2) for x in given[:2])
    keys, queries = (rows_in_place(x) for x in given[2:4])
    return MemoryInputs(values, elements, keys, queries, given.rates.contiguous(), initial, given.cu_seqlens)


def edges_like(given: MemoryInputs) -> Tensor:
    """Room for the states that enter chunks, by slot."""
    batch, seqlen, heads, width = given.values.shape
    slots = count_slots(batch, seqlen, given.cu_seqlens, CHUNK)
    shape = slots, given.keys.shape[2], heads * width
    return torch.empty(shape, dtype=torch.float32, device=given.values.device)


def forward(given: MemoryInputs) -> MemoryOutputs:
    """Outputs typed like the values, last states and those that enter chunks, float32."""
    given, edges = _laid_out(given), edges_like(given)
    batch, _, heads, width = given.values.shape
    y = torch.empty_like(given.values, memory_format=torch.contiguous_format)
    documents, order = count_documents(batch, given.cu_seqlens), given.keys.shape[2]
    final = torch.empty(documents, heads, width, order, dtype=torch.float32, device=y.device)
    _launch(memory_forward_pass, given, (*given[:6], y, final, edges), (), given[:4])
    return MemoryOutputs(y, final, edges)


def backward(given: MemoryInputs, outputs: MemoryOutputs, cotangents: MemoryOutputs) -> tuple[Tensor | None, ...]:
    """The gradients of values, elements, keys, queries, rates and initial states."""
    given = _laid_out(given)
    values, elements, keys, queries, rates, initial, _ = given
    batch, seqlen, heads, width = values.shape
    options = {"dtype": torch.float32, "device": values.device}
    dy = values.new_zeros(values.shape) if cotangents.y is None else blocks_in_place(cotangents.y, 2)
    dfinal = None if cotangents.final is None else cotangents.final.contiguous()
    dvalues, delements = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (values, elements))
    programs = triton.cdiv(heads, _heads_of_program(width))
    dkeys, dqueries = (torch.empty(programs, *keys.shape, **options) for _ in range(2))
    of_states = count_documents(batch, given.cu_seqlens), heads, width, keys.shape[2]
    drates, dinitial = (torch.empty(of_states, **options) for _ in range(2))
    tensors = dy, dfinal, *given[:5], outputs.edges, dvalues, delements, dkeys, dqueries, drates, dinitial
    _launch(memory_backward_pass, given, tensors, (batch * seqlen,), (dy, *given[:4]), FINAL=dfinal is not None)
    return (
        dvalues, delements, dkeys.sum(0).to(keys.dtype), dqueries.sum(0).to(queries.dtype),
        drates.sum((0, 2)).to(rates.dtype), None if initial is None else dinitial.to(initial.dtype),
    )  # fmt: skip
