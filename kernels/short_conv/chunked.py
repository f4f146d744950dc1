"""Short depthwise convolution in PyTorch, with a hand-written backward pass.

Tokens are laid out with enough zero rows between documents that one plain convolution over everything cannot
reach from one document into another. Channels stay innermost, which is what depthwise kernels on CPU and GPU
are fast at. Only the inputs are kept for the backward pass; what the activation needs is computed again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad, silu

from matmix.kernels.documents import document_ids
from matmix.kernels.functions import (
    Form,
    Operation,
    Output,
    cache_blocks,
    in_pytorch,
    outside_autocast,
    working,
    working_dtype,
)
from matmix.kernels.short_conv.parts import ConvInputs, backward, forward


class StateConvInputs(NamedTuple):
    """The arguments of matmix::short_conv_from_state, which is causal."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    activation: str | None

    @property
    def plain(self) -> ConvInputs:
        """The convolution of x alone."""
        return ConvInputs(self.x, self.weight, self.bias, True, self.activation, None)

    @property
    def joined(self) -> ConvInputs:
        """That of the state's inputs and x, whose first outputs belong to the state."""
        return self.plain._replace(x=torch.cat([self.state.mT.to(self.x.dtype), self.x], 1))


class StateConvOutputs(NamedTuple):
    """The results of matmix::short_conv_from_state."""

    y: Tensor
    state: Tensor


class ConvStepInputs(NamedTuple):
    """The arguments of matmix::short_conv_step."""

    x: Tensor
    state: Tensor
    weight: Tensor
    bias: Tensor | None = None
    activation: str | None = None


class ConvCanvas(NamedTuple):
    """Rows of tokens with `left` zero rows before each document and after the last one."""

    left: int
    right: int
    tokens: Tensor | None
    """(seqlen,) row of each token, None where there is one document per batch row."""
    sources: Tensor | None
    """(rows,) token of each row; any token for the zero rows."""
    gaps: Tensor | None
    """The zero rows."""
    seqlen: int
    rows: int

    def spread(self, x: Tensor) -> Tensor:
        """(batch, seqlen, d) -> (batch, rows, d)."""
        if self.tokens is None:
            return pad(x, (0, 0, self.left, self.left))
        # Reading by index is several times faster than writing by index.
        return x.index_select(1, self.sources).index_fill_(1, self.gaps, 0)

    def gather(self, x: Tensor, before: int) -> Tensor:
        """Returns the convolved rows that belong to tokens; `before` zero rows were used up to the left."""
        if self.tokens is None:
            return x[:, self.left - before : self.left - before + self.seqlen]
        return x.index_select(1, self.tokens - before)


def conv_canvas(given: ConvInputs) -> ConvCanvas:
    x, cu_seqlens, left, right = given.x, given.cu_seqlens, given.left, given.right
    seqlen = x.shape[1]
    if cu_seqlens is None:
        return ConvCanvas(left, right, None, None, None, seqlen, seqlen + 2 * left)
    ids = document_ids(cu_seqlens, seqlen)
    tokens = torch.arange(seqlen, device=x.device) + (ids + 1) * left
    rows = seqlen + cu_seqlens.shape[0] * left
    sources = tokens.new_zeros(rows).index_copy_(0, tokens, torch.arange(seqlen, device=x.device))
    before = torch.arange(cu_seqlens.shape[0], device=x.device) * left
    gaps = (cu_seqlens + before)[:, None] + torch.arange(left, device=x.device)
    return ConvCanvas(left, right, tokens, sources, gaps.flatten(), seqlen, rows)


def depthwise_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Correlate (batch, rows, d) with (d, width) along the rows: (batch, rows - width + 1, d), channels innermost."""
    out = conv2d(x.transpose(1, 2).unsqueeze(2), weight[:, None, None], bias, groups=weight.shape[0])
    return out.squeeze(2).transpose(1, 2)


@outside_autocast
def conv_forward(given: ConvInputs) -> Tensor:
    x, weight, bias, _, activation, *_ = given
    dtype, canvas = working_dtype(x), conv_canvas(given)
    spread = canvas.spread(x.to(dtype))
    out = depthwise_rows(spread, weight.to(dtype), None if bias is None else bias.to(dtype))
    out = canvas.gather(out, canvas.left)
    out = silu(out) if activation == "silu" else out
    return out.to(x.dtype, memory_format=torch.contiguous_format).contiguous()


@outside_autocast
def conv_backward(given: ConvInputs, _: Output, cotangents: Output) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight, bias, _, activation, *_ = given
    dtype, canvas = working_dtype(x), conv_canvas(given)
    width, taps = weight.shape[1], weight.to(dtype)
    spread = canvas.spread(x.to(dtype))
    gradient = cotangents.y.to(dtype)
    if activation == "silu":
        out = depthwise_rows(spread, taps, None if bias is None else bias.to(dtype))
        gradient = silu_backward(gradient, canvas.gather(out, canvas.left))
    dbias = None if bias is None else gradient.sum((0, 1)).to(bias.dtype)
    gradient = canvas.spread(gradient)
    dx = canvas.gather(depthwise_rows(gradient, taps.flip(1), None), canvas.right)
    dweight = torch.zeros(width, weight.shape[0], dtype=dtype, device=x.device)
    tokens, channels = canvas.rows - 2 * canvas.left, weight.shape[0]
    # Several short rows of the batch at once, long ones in pieces.
    for at in cache_blocks(x.shape[0], tokens * channels, torch.device("cpu")):
        for piece in cache_blocks(tokens, channels, x.device):
            # Tokens' gradients stand in rows left .. rows - left; tap j meets them with the input `left - j` rows
            # earlier.
            part = gradient[at, piece.start + canvas.left : piece.stop + canvas.left]
            for tap in range(width):
                dweight[tap] += (part * spread[at, piece.start + tap : piece.stop + tap]).sum((0, 1))
    dx = dx.to(x.dtype, memory_format=torch.contiguous_format).contiguous()
    return dx, dweight.t().to(weight.dtype, memory_format=torch.contiguous_format).contiguous(), dbias


def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """dy times the derivative of x sigmoid(x)."""
    s = torch.sigmoid(x)
    return dy * (s * (1 + x * (1 - s)))


SHORT_CONV = Operation(
    "short_conv", ConvInputs, Output, Form(conv_forward, conv_backward), forward=forward, backward=backward
)


def last_inputs(joined: Tensor, state: Tensor) -> Tensor:
    """The last inputs of [state | x], shaped and typed like `state`: a copy, else a few rows would keep all of a long
    prompt in memory."""
    return joined[:, -state.shape[2] :].mT.to(state.dtype, copy=True, memory_format=torch.contiguous_format)


def conv_from_state_forward(given: StateConvInputs) -> tuple[Tensor, Tensor]:
    joined, state = given.joined, given.state
    return conv_forward(joined)[:, state.shape[2] :].contiguous(), last_inputs(joined.x, state)


def conv_from_state_backward(
    given: StateConvInputs, _: StateConvOutputs, cotangents: StateConvOutputs
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    held = given.state.shape[2]
    dx, dweight, dbias = conv_backward(given.joined, _, Output(pad(cotangents.y, (0, 0, held, 0))))
    dx[:, -held:] += cotangents.state.mT
    dstate = dx[:, :held].mT.to(given.state.dtype, memory_format=torch.contiguous_format)
    return dx[:, held:].contiguous(), dweight, dbias, dstate.contiguous()


def state_conv_backward(form: Form, given: StateConvInputs, outputs: StateConvOutputs, cotangents: StateConvOutputs):
    """The gradients by a form; of outputs that nothing was made of they are zeros."""
    dy = torch.zeros_like(given.x) if cotangents.y is None else cotangents.y
    dstate = torch.zeros_like(given.state) if cotangents.state is None else cotangents.state
    return form.backward(given, outputs, StateConvOutputs(dy, dstate))


STATE_CONV = Operation(
    "short_conv_from_state", StateConvInputs, StateConvOutputs, Form(conv_from_state_forward, conv_from_state_backward),
    backward=state_conv_backward,
)  # fmt: skip


def short_conv_torch(
    *tensors: Tensor | None, initial_state: Tensor | None = None, return_final_state: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`short_conv` in PyTorch, without argument checks; see there."""
    given, convolve = ConvInputs(*tensors, **options), in_pytorch(SHORT_CONV)
    if initial_state is None and not return_final_state:
        return convolve(given).y
    x, weight, bias, *_ = given
    state = x.new_zeros(x.shape[0], x.shape[2], weight.shape[1] - 1) if initial_state is None else initial_state
    joined = StateConvInputs(x, weight, bias, state, given.activation).joined
    y = convolve(joined).y[:, state.shape[2] :]
    return (y, last_inputs(joined.x, state)) if return_final_state else y


@outside_autocast
def conv_step_forward(given: ConvStepInputs, in_place: bool) -> tuple[Tensor, Tensor]:
    """y (batch, d) typed like x, and the new state, with `in_place` in the memory of the given one."""
    x, state, weight, bias, activation = given
    exact = working(x)
    out = exact * weight[:, -1].to(exact.dtype) + (state.to(exact.dtype) * weight[:, :-1].to(exact.dtype)).sum(-1)
    if bias is not None:
        out = out + bias.to(exact.dtype)
    out = silu(out) if activation == "silu" else out
    new = torch.cat([state[..., 1:], x.unsqueeze(-1).to(state.dtype)], -1)
    return out.to(x.dtype), state.copy_(new) if in_place else new


def short_conv_step_torch(*tensors: Tensor | None, in_place: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    """`short_conv_step` in PyTorch, without argument checks; see there."""
    return conv_step_forward(ConvStepInputs(*tensors, **options), in_place)
