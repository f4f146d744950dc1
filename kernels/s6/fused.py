"""The selective scan of Mamba-1 in Triton, forward and backward; only the inputs are stored for the backward pass.

A program goes along the tokens of one row or document with the states of a block of channels in registers, laid out
(state, channel): a thread holds all states of its channel, or with several warps some of them, so that nothing is sent
between threads but sums over states of several warps and, backward, the gradients of B and C, which all channels share.
The backward pass first goes forward once more and stores the state that enters each chunk of a few tokens; then a
program goes back over the chunks, computes the states within one again and carries the gradient of the state. Sums
over channels and rows are left by program, and PyTorch adds them in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.launching import launch, rows_in_place
from matmix.kernels.s6.op import ScanInputs, ScanOutputs
from matmix.kernels.slots import bounds, count_documents, count_slots, first_slot

CHUNK = 8
"""Tokens whose states the backward pass has in registers at a time."""
CHANNELS = 32
"""Channels of a program: one for each thread of a warp."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(x, at, there):
    return tl.load(x + at, there, other=0.0).to(tl.float32)


@triton.jit
def _entered(state, x, dt, b, rates):
    """The state (N, channels) after a token; of one beyond the end, whose dt is 0, as it was."""
    return tl.exp2(dt[None, :] * rates) * state + (dt * x)[None, :] * b[:, None]


@triton.jit(do_not_specialize=["seqlen", "per_row"])
def s6_forward(
    x, dt, b, c, rates, initial, y, final, starts, cu_seqlens, seqlen, per_row, d, states, x_batch, x_row, dt_batch,
    dt_row, b_batch, b_row, c_batch, c_row, C: tl.constexpr,
):  # fmt: skip
    """Outputs and the last state; with STARTS, instead, the states that enter chunks."""
    blocks = tl.cdiv(d, C.CHANNELS)
    document = tl.program_id(0) // blocks
    channel = (tl.program_id(0) - document * blocks) * C.CHANNELS + tl.arange(0, C.CHANNELS)
    n = tl.arange(0, C.STATES)
    begin, length = bounds(document, cu_seqlens, seqlen, C.PACKED)
    row = (document * (0 if C.PACKED else 1)).to(tl.int64)
    token = begin.to(tl.int64)
    x += row * x_batch + token * x_row
    dt += row * dt_batch + token * dt_row
    b += row * b_batch + token * b_row
    c += row * c_batch + token * c_row
    here, kept = channel < d, n < states
    both = kept[:, None] & here[None, :]
    across = channel[None, :] * states + n[:, None]
    decay = _load(rates, across, both) * _LOG2_E
    state = tl.zeros((C.STATES, C.CHANNELS), tl.float32)
    whole = document.to(tl.int64) * d * states
    if C.INITIAL:
        state += _load(initial, whole + across, both)
    slot = first_slot(document, begin, per_row, C.CHUNK, C.PACKED)
    for chunk in range(tl.cdiv(length, C.CHUNK)):
        if C.STARTS:
            at = starts + (slot + chunk).to(tl.int64) * (states * d)
            tl.store(at + n[:, None] * d + channel[None, :], state, both)
        outputs = ()
        first = token * 0 + chunk * C.CHUNK
        for ahead in tl.static_range(C.CHUNK):
            t = first + ahead
            inside = t < length
            step = _load(dt, t * dt_row + channel, here & inside)
            value = _load(x, t * x_row + channel, here & inside)
            state = _entered(state, value, step, _load(b, t * b_row + n, kept & inside), decay)
            if not C.STARTS:
                read = _load(c, t * c_row + n, kept & inside)
                outputs += (tl.sum(state * read[:, None], 0),)
        if not C.STARTS:
            # Stored together: a load is not moved to before a store.
            for ahead in tl.static_range(C.CHUNK):
                t = first + ahead
                at = y + (row * seqlen + token + t) * d + channel
                tl.store(at, outputs[ahead], here & (t < length))
    if not C.STARTS:
        tl.store(final + whole + across, state, both)


@triton.jit(do_not_specialize=["seqlen", "per_row", "tokens"])
def s6_gradients(
    dy, dfinal, x, dt, b, c, rates, starts, dx, ddt, db, dc, drates, dinitial, cu_seqlens, seqlen, per_row, tokens, d,
    states, dy_batch, dy_row, x_batch, x_row, dt_batch, dt_row, b_batch, b_row, c_batch, c_row, C: tl.constexpr,
):  # fmt: skip
    """dx and ddt, by blocks of channels db and dc, by documents drates, and the gradient of initial states."""
    blocks = tl.cdiv(d, C.CHANNELS)
    document = tl.program_id(0) // blocks
    block = tl.program_id(0) - document * blocks
    channel = block * C.CHANNELS + tl.arange(0, C.CHANNELS)
    n = tl.arange(0, C.STATES)
    begin, length = bounds(document, cu_seqlens, seqlen, C.PACKED)
    row = (document * (0 if C.PACKED else 1)).to(tl.int64)
    token = begin.to(tl.int64)
    dy += row * dy_batch + token * dy_row
    x += row * x_batch + token * x_row
    dt += row * dt_batch + token * dt_row
    b += row * b_batch + token * b_row
    c += row * c_batch + token * c_row
    here, kept = channel < d, n < states
    both = kept[:, None] & here[None, :]
    across = channel[None, :] * states + n[:, None]
    decay = _load(rates, across, both) * _LOG2_E
    gradient = tl.zeros((C.STATES, C.CHANNELS), tl.float32)
    whole = document.to(tl.int64) * d * states
    if C.FINAL:
        gradient += _load(dfinal, whole + across, both)
    of_rates = tl.zeros((C.STATES, C.CHANNELS), tl.float32)
    slot = first_slot(document, begin, per_row, C.CHUNK, C.PACKED)
    chunks = tl.cdiv(length, C.CHUNK)
    for done in range(chunks):
        first = token * 0 + (chunks - 1 - done) * C.CHUNK
        at = starts + (slot + chunks - 1 - done).to(tl.int64) * (states * d)
        state = _load(at, n[:, None] * d + channel[None, :], both)
        entering = (state,)
        values = ()
        steps = ()
        for ahead in tl.static_range(C.CHUNK):
            t = first + ahead
            inside = t < length
            steps += (_load(dt, t * dt_row + channel, here & inside),)
            values += (_load(x, t * x_row + channel, here & inside),)
            state = _entered(state, values[ahead], steps[ahead], _load(b, t * b_row + n, kept & inside), decay)
            entering += (state,)
        for back in tl.static_range(C.CHUNK):
            t = first + (C.CHUNK - 1 - back)
            inside = t < length
            step = steps[C.CHUNK - 1 - back]
            value = values[C.CHUNK - 1 - back]
            cotangent = _load(dy, t * dy_row + channel, here & inside)
            write = _load(b, t * b_row + n, kept & inside)
            read = _load(c, t * c_row + n, kept & inside)
            at = (block * tokens + row * seqlen + token + t) * states + n
            of_read = tl.sum(entering[C.CHUNK - back] * cotangent[None, :], 1)
            tl.store(dc + at, of_read, kept & inside)
            gradient += read[:, None] * cotangent[None, :]
            tl.store(db + at, tl.sum(gradient * (step * value)[None, :], 1), kept & inside)
            of_written = tl.sum(gradient * write[:, None], 0)
            gradient *= tl.exp2(step[None, :] * decay)
            # The gradient of dt A, whose exponential the state was multiplied with.
            of_exponent = gradient * entering[C.CHUNK - 1 - back]
            of_rates += of_exponent * step[None, :]
            of_step = tl.sum(of_exponent * decay, 0) / _LOG2_E + of_written * value
            at = (row * seqlen + token + t) * d + channel
            tl.store(dx + at, (of_written * step).to(dx.dtype.element_ty), here & inside)
            tl.store(ddt + at, of_step.to(ddt.dtype.element_ty), here & inside)
    tl.store(drates + whole + across, of_rates, both)
    if C.INITIAL:
        tl.store(dinitial + whole + across, gradient, both)


def _launch(kernel, given: ScanInputs, tensors: tuple, numbers: tuple, strided: tuple[Tensor, ...], **flags) -> None:
    """One program for each document and block of channels."""
    (batch, seqlen, d), states = given.x.shape, given.b.shape[2]
    padded = triton.next_power_of_2(states)
    strides = (stride for each in strided for stride in each.stride()[:2])
    launch(
        kernel, (count_documents(batch, given.cu_seqlens) * triton.cdiv(d, CHANNELS),),
        *tensors, given.cu_seqlens, seqlen, triton.cdiv(seqlen, CHUNK), *numbers, d, states, *strides,
        num_warps=max(1, padded // 16), STATES=padded, CHANNELS=CHANNELS, CHUNK=CHUNK,
        PACKED=given.cu_seqlens is not None, INITIAL=given.initial_state is not None, **flags,
    )  # fmt: skip


def _laid_out(given: ScanInputs) -> ScanInputs:
    initial = None if given.initial_state is None else given.initial_state.contiguous()
    return ScanInputs(*map(rows_in_place, given[:4]), given.rates.contiguous(), initial, given.cu_seqlens)


def forward(given: ScanInputs) -> tuple[Tensor, Tensor]:
    """Outputs (batch, seqlen, channels) and last states (rows or documents, channels, N), float32."""
    given = _laid_out(given)
    batch, options = given.x.shape[0], {"dtype": torch.float32, "device": given.x.device}
    y = torch.empty(given.x.shape, **options)
    final = torch.empty(count_documents(batch, given.cu_seqlens), *given.rates.shape, **options)
    tensors = (*given[:6], y, final, None)
    _launch(s6_forward, given, tensors, (), given[:4], STARTS=False)
    return y, final


def backward(given: ScanInputs, _: ScanOutputs, cotangents: ScanOutputs) -> tuple[Tensor | None, ...]:
    """The gradients of x, dt, b, c, rates and initial states."""
    given = _laid_out(given)
    x, dt, b, c, rates, initial, cu_seqlens = given
    (batch, seqlen, d), states = x.shape, b.shape[2]
    options = {"dtype": torch.float32, "device": x.device}
    dy = x.new_zeros(()).expand(x.shape) if cotangents.y is None else cotangents.y
    dy, dfinal = rows_in_place(dy), None if cotangents.state is None else cotangents.state.contiguous()
    starts = torch.empty(count_slots(batch, seqlen, cu_seqlens, CHUNK), states, d, **options)
    _launch(s6_forward, given, (*given[:6], None, None, starts), (), given[:4], STARTS=True)
    dx, ddt = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, dt))
    db, dc = (torch.empty(triton.cdiv(d, CHANNELS), batch, seqlen, states, **options) for _ in range(2))
    drates = torch.empty(count_documents(batch, cu_seqlens), *rates.shape, **options)
    dinitial = None if initial is None else torch.empty(initial.shape, **options)
    tensors = dy, dfinal, *given[:5], starts, dx, ddt, db, dc, drates, dinitial
    _launch(s6_gradients, given, tensors, (batch * seqlen,), (dy, *given[:4]), FINAL=dfinal is not None)
    sums = (total.sum(0).to(like.dtype) for total, like in ((db, b), (dc, c), (drates, rates)))
    return dx, ddt, *sums, None if dinitial is None else dinitial.to(initial.dtype)
