"""Short depthwise convolution in Triton, forward and backward, one launch each.

A program takes some channels and walks along the tokens of a document with the rows that the taps reach in registers:
each row is read once and moves through the window. Rows outside of the document are zero where they are read, so that
nothing, not even a NaN, passes from one document to another; with STATE the rows before a causal document are those of
a state.

Backward, the same walk computes the pre-activation again and from it g, its gradient. Two sums follow at once: g
convolved with the taps in reverse is the gradient of x, and g times x, for every tap, that of the weights. Programs
begin some rows before their own, to have the window filled, and PyTorch adds their sums of weights in a fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from matmix.kernels.functions import Output
from matmix.kernels.launching import ForcedConfiguration, launch, rows_in_place
from matmix.kernels.short_conv.chunked import StateConvInputs, StateConvOutputs
from matmix.kernels.short_conv.parts import ConvInputs
from matmix.kernels.slots import count_slots, located, slot_table


class ConvConfig(NamedTuple):
    """Tile sizes and launch options."""

    channels: int
    """Channels of a program."""
    rows: int
    """Rows between two turns of the loop along the tokens: they are loaded together."""
    span: int
    """Tokens of a document that one program walks along, in the backward pass several times."""
    num_warps: int


_WIDE = ConvConfig(channels=128, rows=8, span=128, num_warps=1)
_FEW_TOKENS = ConvConfig(channels=64, rows=8, span=16, num_warps=1)
_NARROW = ConvConfig(channels=32, rows=8, span=32, num_warps=1)

PROGRAMS = 4096
"""About the most programs of the backward pass. They fill any GPU, and their sums take a few megabytes however many
tokens there are."""

force_configuration = ForcedConfiguration()


def configurations() -> tuple[ConvConfig, ...]:
    """All configurations that `choose_config` can return."""
    return _WIDE, _FEW_TOKENS, _NARROW


def choose_config(batch: int, seqlen: int, d: int) -> ConvConfig:
    """Chooses from shapes alone, never by timing: another tile rounds differently, and runs must repeat."""
    if force_configuration.value is not None:
        return force_configuration.value
    if d <= 32:
        return _NARROW
    if batch * seqlen * d < 1 << 20:  # fewer programs of the wide kind than a large GPU can run at once
        return _FEW_TOKENS
    return _WIDE


@triton.jit
def _row(x, stride, at, length, channel, there):
    """A row of a document, at any place from its first token on, in float32; zero outside of it."""
    inside = (at >= 0) & (at < length)
    return tl.load(x + at.to(tl.int64) * stride + channel, there & inside, other=0.0).to(tl.float32)


@triton.jit
def _held(state, batch_row, at, channel, there, d, WIDTH: tl.constexpr):
    """A row of the state (batch, d, WIDTH - 1), at any place before the first token, in float32; zero from there on."""
    row = state + (batch_row.to(tl.int64) * d + channel) * (WIDTH - 1)
    return tl.load(row + at + (WIDTH - 1), there & (at < 0), other=0.0).to(tl.float32)


@triton.jit
def _taps(weight, channel, there, WIDTH: tl.constexpr):
    """The weights of the channels, a vector for each tap."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        taps += (tl.load(weight + channel * WIDTH + tap, there, other=0.0).to(tl.float32),)
    return taps


@triton.jit(do_not_specialize=["seqlen", "per_row"])
def _convolve(x, weight, bias, state, y, final, table, seqlen, per_row, d, batch_stride, row_stride, C: tl.constexpr):
    """y_t = activation(bias + sum over taps j of weight[:, j] x_{t + j - LEFT}). With STATE also the end of
    [state | x]."""
    # Neighbouring programs take neighbouring channels of the same rows: whole rows are read at about one time.
    blocks = tl.cdiv(d, C.CHANNELS)
    slot = tl.program_id(0) // blocks
    channel = (tl.program_id(0) - slot * blocks) * C.CHANNELS + tl.arange(0, C.CHANNELS)
    there = channel < d
    piece, batch_row, begin, length = located(slot, table, seqlen, per_row, C.PACKED)
    first = piece * C.SPAN
    own = tl.minimum(length - first, C.SPAN)
    x += batch_row.to(tl.int64) * batch_stride + begin.to(tl.int64) * row_stride
    y += (batch_row.to(tl.int64) * seqlen + begin) * d
    weights = _taps(weight, channel, there, C.WIDTH)
    offset = tl.zeros((C.CHANNELS,), tl.float32)
    if C.BIAS:
        offset += tl.load(bias + channel, there, other=0.0).to(tl.float32)
    window = ()
    for tap in tl.static_range(C.WIDTH - 1):
        row = _row(x, row_stride, first + tap - C.LEFT, length, channel, there)
        if C.STATE:
            row += _held(state, batch_row, first + tap - C.LEFT, channel, there, d, C.WIDTH)
        window += (row,)
    for step in range(tl.cdiv(own, C.ROWS)):
        t = first + step * C.ROWS
        rows = window
        for ahead in tl.static_range(C.ROWS):
            rows += (_row(x, row_stride, t + ahead + (C.WIDTH - 1 - C.LEFT), length, channel, there),)
        for ahead in tl.static_range(C.ROWS):
            total = offset
            for tap in tl.static_range(C.WIDTH):
                total += weights[tap] * rows[ahead + tap]
            if C.SILU:
                total = total * tl.sigmoid(total)
            at = y + (t + ahead).to(tl.int64) * d + channel
            tl.store(at, total.to(y.dtype.element_ty), there & (t + ahead < first + own))
        window = rows[C.ROWS :]
    if C.STATE:
        there = there & (piece == per_row - 1)
        final += (batch_row.to(tl.int64) * d + channel) * (C.WIDTH - 1)
        for place in tl.static_range(C.WIDTH - 1):
            source = length + place - (C.WIDTH - 1)
            row = _row(x, row_stride, source, length, channel, there)
            row += _held(state, batch_row, source, channel, there, d, C.WIDTH)
            tl.store(final + place, row.to(final.dtype.element_ty), there)


@triton.jit(do_not_specialize=["seqlen", "per_row", "slots", "walk"])
def _conv_gradients(
    dy, dfinal, more_dy, x, weight, bias, state, dx, dstate, sums, table, seqlen, per_row, slots, walk, d, more_d,
    dy_batch_stride, dy_row_stride, more_batch_stride, more_row_stride, batch_stride, row_stride, dx_batch_stride,
    dx_row_stride, C: tl.constexpr,
):  # fmt: skip
    """Computes, over `walk` spans, dx, and the sums of g x per tap, then of g, over the spans' own tokens. With STATE
    also dstate, and dfinal is added to the rows that the final state was made of. With MORE, the gradient of the first
    more_d channels is dy + more_dy."""
    blocks = tl.cdiv(d, C.CHANNELS)
    program = tl.program_id(0) // blocks
    channel = (tl.program_id(0) - program * blocks) * C.CHANNELS + tl.arange(0, C.CHANNELS)
    there = channel < d
    right: tl.constexpr = C.WIDTH - 1 - C.LEFT
    weights = _taps(weight, channel, there, C.WIDTH)
    zero = tl.zeros((C.CHANNELS,), tl.float32)
    offset = zero
    if C.BIAS:
        offset += tl.load(bias + channel, there, other=0.0).to(tl.float32)
    tap_sums = ()
    for _ in tl.static_range(C.WIDTH + C.BIAS):
        tap_sums += (zero,)
    for slot in range(program * walk, tl.minimum(program * walk + walk, slots)):
        piece, batch_row, begin, length = located(slot, table, seqlen, per_row, C.PACKED)
        first = piece * C.SPAN
        end = tl.minimum(first + C.SPAN, length)
        at_x = x + batch_row.to(tl.int64) * batch_stride + begin.to(tl.int64) * row_stride
        at_dy = dy + batch_row.to(tl.int64) * dy_batch_stride + begin.to(tl.int64) * dy_row_stride
        at_dx = dx + batch_row.to(tl.int64) * dx_batch_stride + begin.to(tl.int64) * dx_row_stride
        if C.MORE:
            at_more = more_dy + batch_row.to(tl.int64) * more_batch_stride + begin.to(tl.int64) * more_row_stride
        # dx of a token is made of g from `right` tokens before it to LEFT tokens after it.
        start = first - right
        window = ()
        gradients = ()
        for tap in tl.static_range(C.WIDTH - 1):
            row = _row(at_x, row_stride, start + tap - C.LEFT, length, channel, there)
            if C.STATE:
                row += _held(state, batch_row, start + tap - C.LEFT, channel, there, d, C.WIDTH)
            window += (row,)
            gradients += (zero,)
        steps = tl.where(first < length, tl.cdiv(end + C.LEFT - start, C.ROWS), 0)
        for step in range(steps):
            p = start + step * C.ROWS
            rows = window
            grads = gradients
            cotangents = ()
            for ahead in tl.static_range(C.ROWS):
                rows += (_row(at_x, row_stride, p + ahead + right, length, channel, there),)
                cotangent = _row(at_dy, dy_row_stride, p + ahead, length, channel, there)
                if C.MORE:
                    cotangent += _row(at_more, more_row_stride, p + ahead, length, channel, channel < more_d)
                cotangents += (cotangent,)
            for ahead in tl.static_range(C.ROWS):
                at = p + ahead
                g = cotangents[ahead]
                if C.SILU:
                    total = offset
                    for tap in tl.static_range(C.WIDTH):
                        total += weights[tap] * rows[ahead + tap]
                    sigmoid = tl.sigmoid(total)
                    g *= sigmoid * (1 + total * (1 - sigmoid))
                    # Beyond the document there is no g, even where a NaN is within reach.
                    g = tl.where((at >= 0) & (at < length), g, 0.0)
                grads += (g,)
                counted = tl.where((at >= first) & (at < end), g, 0.0)
                more = ()
                for tap in tl.static_range(C.WIDTH):
                    more += (tap_sums[tap] + counted * rows[ahead + tap],)
                if C.BIAS:
                    more += (tap_sums[C.WIDTH] + counted,)
                tap_sums = more
                total = zero
                for tap in tl.static_range(C.WIDTH):
                    total += weights[tap] * grads[ahead + C.WIDTH - 1 - tap]
                target = at - C.LEFT
                if C.STATE:
                    held = (batch_row.to(tl.int64) * d + channel) * (C.WIDTH - 1)
                    place = target - length + (C.WIDTH - 1)
                    kept = there & (place >= 0) & (target < length)
                    total += tl.load(dfinal + held + place, kept, other=0.0).to(tl.float32)
                    # Of a document's first span, the targets before its first token are all in the state.
                    before = there & (first == 0) & (target < 0)
                    tl.store(dstate + held + target + (C.WIDTH - 1), total.to(dstate.dtype.element_ty), before)
                mask = there & (target >= first) & (target < end)
                tl.store(at_dx + target.to(tl.int64) * dx_row_stride + channel, total.to(dx.dtype.element_ty), mask)
            window = rows[C.ROWS :]
            gradients = grads[C.ROWS :]
    for index in tl.static_range(C.WIDTH + C.BIAS):
        at = sums + (program * (C.WIDTH + C.BIAS) + index).to(tl.int64) * d + channel
        tl.store(at, tap_sums[index], there)


def forward(given: ConvInputs) -> Tensor:
    """See `conv_forward` of the PyTorch form."""
    return convolve(given, None)[0]


def forward_from_state(given: StateConvInputs) -> tuple[Tensor, Tensor]:
    """See `conv_from_state_forward` of the PyTorch form."""
    return convolve(given.plain, given.state)


def convolve(given: ConvInputs, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The output and, after a state (batch, d, width - 1), which needs `causal` and no packing, the state it leaves."""
    batch, seqlen, d = given.x.shape
    config = choose_config(batch, seqlen, d)
    x, state = rows_in_place(given.x), None if state is None else state.contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    final = None if state is None else torch.empty_like(state)
    slots = count_slots(batch, seqlen, given.cu_seqlens, config.span)
    launch(
        _convolve, (slots * triton.cdiv(d, config.channels),),
        x, *_contiguous(given), state, y, final, slot_table(batch, seqlen, given.cu_seqlens, config.span),
        seqlen, triton.cdiv(seqlen, config.span), d, x.stride(0), x.stride(1),
        **_options(config, given, state),
    )  # fmt: skip
    return y, final


def backward(given: ConvInputs, _: Output, cotangents: Output) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `conv_backward` of the PyTorch form."""
    dx = torch.empty_like(given.x, memory_format=torch.contiguous_format)
    sums, _ = gradients(cotangents.y, given, dx)
    return dx, *_of_parameters(sums, given)


def backward_from_state(
    given: StateConvInputs, _: StateConvOutputs, cotangents: StateConvOutputs
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """See `conv_from_state_backward` of the PyTorch form."""
    dx = torch.empty_like(given.x, memory_format=torch.contiguous_format)
    sums, dstate = gradients(cotangents.y, given.plain, dx, state=given.state, dfinal=cotangents.state)
    return dx, *_of_parameters(sums, given.plain), dstate


def _of_parameters(sums: Tensor, given: ConvInputs) -> tuple[Tensor, Tensor | None]:
    """Gradients of weight and bias, typed like them, from what `gradients` returns."""
    total, width, bias = sums.sum(0), given.weight.shape[1], given.bias
    dweight = total[:width].t().to(given.weight.dtype, memory_format=torch.contiguous_format).contiguous()
    return dweight, None if bias is None else total[width].to(bias.dtype).clone()


def gradients(
    dy: Tensor, given: ConvInputs, dx: Tensor, *,
    more_dy: Tensor | None = None, state: Tensor | None = None, dfinal: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Writes the gradient of x into `dx`, strided as it may be, and returns sums (programs, width or with a bias width
    + 1, d) float32, whose sum over programs is the gradient of the taps, then of the bias; and that of the state.

    more_dy: (batch, seqlen, some channels), what is to be added to the gradient of as many first channels of y.
    dfinal: the gradient of the state that is left, given exactly where a state is.
    """
    batch, seqlen, d = given.x.shape
    config = choose_config(batch, seqlen, d)
    dy, x = rows_in_place(dy), rows_in_place(given.x)
    dstate = None
    if state is not None:
        state, dfinal = state.contiguous(), dfinal.contiguous()
        dstate = torch.empty_like(state)
    blocks = triton.cdiv(d, config.channels)
    slots = count_slots(batch, seqlen, given.cu_seqlens, config.span)
    walk = triton.cdiv(slots, max(1, PROGRAMS // blocks))
    programs = triton.cdiv(slots, walk)
    taps_and_bias = given.weight.shape[1] + (given.bias is not None)
    sums = torch.empty(programs, taps_and_bias, d, dtype=torch.float32, device=x.device)
    more_strides = (0, 0) if more_dy is None else more_dy.stride()[:2]
    launch(
        _conv_gradients, (programs * blocks,),
        dy, dfinal, more_dy, x, *_contiguous(given), state, dx, dstate, sums,
        slot_table(batch, seqlen, given.cu_seqlens, config.span),
        seqlen, triton.cdiv(seqlen, config.span), slots, walk, d, 0 if more_dy is None else more_dy.shape[2],
        *dy.stride()[:2], *more_strides, *x.stride()[:2], *dx.stride()[:2],
        **_options(config, given, state), MORE=more_dy is not None,
    )  # fmt: skip
    return sums, dstate


def _contiguous(given: ConvInputs) -> tuple[Tensor, Tensor | None]:
    return given.weight.contiguous(), None if given.bias is None else given.bias.contiguous()


def _options(config: ConvConfig, given: ConvInputs, state: Tensor | None) -> dict:
    return {
        "WIDTH": given.weight.shape[1], "LEFT": given.left, "SILU": given.activation == "silu",
        "BIAS": given.bias is not None, "PACKED": given.cu_seqlens is not None, "STATE": state is not None,
        "SPAN": config.span, "ROWS": config.rows, "CHANNELS": config.channels, "num_warps": config.num_warps,
        "num_stages": 1,
    }  # fmt: skip
